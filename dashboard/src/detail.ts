// One disk: charts by cause, histograms, the data in its cache, and forms for changes.

import { diskPath } from './api';
import { CAUSES } from './causes';
import { TimeChart, type Line } from './charts';
import { CurveCard } from './curve';
import { DirtyCard } from './dirty';
import { h, mark, say } from './dom';
import { bytes, count, duration, iops, mib, ms, percent } from './format';
import { HistogramCard } from './histogram';
import type { Histories } from './history';
import { Poll } from './poll';
import { sum, type Rates } from './rates';
import { CacheForm, QosForm } from './settings';
import { sizeOf } from './shared';
import type { DiskNow, Explanation, Snapshot } from './types';
import { verdict } from './why';

/** Creates a line of a chart from the rates of each point. */
function of(label: string, color: string, value: (rates: Rates) => number | undefined, dash = false): Line {
  return { label, color, dash, value: (point) => point.rates && value(point.rates) };
}

const number = (value: number): string => iops(value);

export class Detail {
  readonly root: HTMLElement;
  readonly #name = h('h2', { id: 'detail-name', tabindex: -1 });
  readonly #facts = h('p', { class: 'facts' });
  readonly #verdict = h('p', { class: 'verdict' });
  readonly #sentences = h('ul', { class: 'sentences' });
  readonly #totals = h('p', { class: 'facts', id: 'totals' });
  readonly #charts = charts();
  readonly #histogram = new HistogramCard();
  readonly #curve = new CurveCard();
  readonly #dirty = new DirtyCard();
  readonly #cache = new CacheForm();
  readonly #qos = new QosForm();
  readonly #poll: Poll<Explanation>;
  readonly #body: HTMLElement;

  constructor() {
    const explained = h('details', { class: 'explained' }, h('summary', {}, 'Since it came online'), this.#totals, this.#sentences);
    this.#body = h(
      'div',
      {},
      h('div', { class: 'charts' }, ...this.#charts.map((chart) => chart.root)),
      h('div', { class: 'cards' }, stack(this.#curve.root, this.#dirty.root), stack(this.#histogram.root), stack(this.#cache.root, this.#qos.root)),
    );
    this.root = h('section', { id: 'detail', 'aria-labelledby': 'detail-name' }, this.#name, this.#facts, this.#verdict, explained, this.#body);
    this.#poll = new Poll<Explanation>(
      5000,
      (found) => this.#explain(found.sentences),
      (why) => this.#explain([why]),
    );
  }

  /** Scrolls to the disk and sets the focus to it. */
  reveal(): void {
    const isCalm = matchMedia('(prefers-reduced-motion: reduce)').matches;
    this.root.scrollIntoView({ behavior: isCalm ? 'auto' : 'smooth', block: 'start' });
    this.#name.focus({ preventScroll: true });
  }

  show(now: DiskNow | undefined, snapshot: Snapshot, histories: Histories): void {
    mark(this.root, 'hidden', now ? undefined : '');
    if (!now) return;
    const { disk, figures } = now;
    const history = histories.of(disk.name);
    say(this.#name, disk.name);
    say(this.#facts, factsOf(now));
    const store = snapshot.datastores?.find((one) => one.name === now.qos?.datastore);
    const why = verdict(now, history.recent, store);
    say(this.#verdict, why.text);
    mark(this.#verdict, 'data-severity', why.severity);
    const requests = sum((figures?.outcomes ?? []).map((outcome) => outcome.count));
    say(
      this.#totals,
      figures
        ? `${count(requests)} requests in ${duration(figures.elapsed_ns / 1e9)}: ${count(figures.reads)} reads (${bytes(figures.read_bytes)}), ` +
            `${count(figures.writes)} writes (${bytes(figures.write_bytes)}); ${count(figures.in_flight)} in flight`
        : 'There are no figures while the disk is offline.',
    );
    this.#charts.forEach((chart) => chart.show(history.points));
    this.#dirty.show(now);
    this.#cache.show(now, snapshot);
    this.#qos.show(now);
    this.#histogram.show(disk.name);
    this.#curve.show(disk.name);
    this.#poll.at(diskPath(disk.name, '/explain'));
  }

  #explain(sentences: string[]): void {
    const shown = [...this.#sentences.children].map((item) => item.textContent);
    if (shown.join('\n') === sentences.join('\n')) return;
    this.#sentences.replaceChildren(...sentences.map((sentence) => h('li', {}, sentence)));
  }
}

/** Returns the parts, one below the other. */
function stack(...cards: HTMLElement[]): HTMLElement {
  return h('div', { class: 'stack' }, ...cards);
}

function factsOf({ disk, qos }: DiskNow): string {
  const parts = [`${bytes(disk.size)} at ${disk.backing}`];
  if (disk.read_only) parts.push('read-only');
  if (qos?.datastore) parts.push(`datastore ${qos.datastore}`);
  const cache = disk.cache;
  if (cache) {
    const survives = cache.persistent ? ', persistent' : '';
    const preset = cache.preset ? ` (preset ${cache.preset})` : '';
    parts.push(`cache of ${sizeOf(cache)} in ${cache.pool}: ${cache.mode}${preset}, ${cache.policy}, admission ${cache.admission}${survives}`);
    if (cache.reason) parts.push(cache.reason);
  } else {
    parts.push('no cache');
  }
  if (disk.reason) parts.push(disk.reason);
  return parts.join(' · ');
}

function charts(): TimeChart[] {
  const byCause = CAUSES.map((cause, index) => of(cause.label, cause.color, (rates) => rates.byCause[index] ?? 0));
  const meanOf = (index: number) => (rates: Rates): number | undefined => {
    const requests = rates.byCause[index] ?? 0;
    return requests > 0 ? (rates.timeByCause[index] ?? 0) / requests / 1e6 : undefined;
  };
  const latencies = CAUSES.map((cause, index) => of(cause.label, cause.color, meanOf(index)));
  return [
    new TimeChart({ title: 'Requests by cause', unit: 'IOPS', lines: byCause, format: number, isStacked: true, isSparse: true }),
    new TimeChart({
      title: 'Latency by cause',
      unit: 'ms, mean; logarithmic axis',
      lines: [
        of('all', '--ink', (rates) => scaled(rates.meanNs)),
        of('99 %', '--ink-2', (rates) => scaled(rates.p99Ns), true),
        ...latencies,
      ],
      format: (value) => (value < 0.0995 ? String(Number(value.toPrecision(2))) : ms(value * 1e6)),
      isLogarithmic: true,
      isSparse: true,
    }),
    new TimeChart({
      title: 'Hit ratio of reads',
      unit: '% of reads',
      lines: [
        of('in memory', '--cause-memory', (rates) => (rates.memoryHits === undefined ? undefined : 100 * rates.memoryHits)),
        of('in flash', '--cause-flash', (rates) => (rates.flashHits === undefined ? undefined : 100 * rates.flashHits)),
      ],
      format: (value) => percent(value / 100).replace('\u00a0%', ''),
      isStacked: true,
      max: 100,
    }),
    new TimeChart({
      title: 'Throughput',
      unit: 'MiB/s',
      lines: [
        of('read', '--cause-flash', (rates) => rates.readBytes / 1048576),
        of('written', '--cause-write-through', (rates) => rates.writeBytes / 1048576),
        of('destaged', '--cause-past', (rates) => rates.destagedBytes / 1048576, true),
      ],
      format: (value) => mib(value * 1048576),
    }),
  ];
}

/** Converts nanoseconds to milliseconds. */
function scaled(nanos: number | undefined): number | undefined {
  return nanos === undefined ? undefined : nanos / 1e6;
}
