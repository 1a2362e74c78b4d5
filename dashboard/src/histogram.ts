// The I/O pattern of a disk: the histograms of vscsiStats, one at a time, as bars and as numbers.

import uPlot from 'uplot';
import { Refused, ask, currentRole, diskPath } from './api';
import { axis, fit, niceTop } from './charts';
import { confirm } from './confirm';
import { Parts, h, mark, say } from './dom';
import { count, duration, percent } from './format';
import { Poll } from './poll';
import { color, onTheme } from './theme';
import type { Histogram, Histograms } from './types';

const HEIGHT = 230;

const METRICS: [string, string][] = [
  ['latency', 'Latency'],
  ['length', 'Length'],
  ['seek', 'Seek distance'],
  ['seek-nearest', 'Seek distance, nearest of 16'],
  ['outstanding', 'Outstanding'],
  ['interarrival', 'Time between requests'],
];

const CLASSES: [string, string][] = [
  ['all', 'reads and writes'],
  ['reads', 'reads'],
  ['writes', 'writes'],
];

export class HistogramCard {
  readonly root: HTMLElement;
  readonly #metric = choice('metric', METRICS);
  readonly #class = choice('class', CLASSES);
  readonly #text = h('p', { class: 'facts' });
  readonly #reset: HTMLButtonElement;
  readonly #plot: uPlot;
  readonly #rows: Parts<Row, { root: HTMLElement; cells: HTMLElement[] }>;
  readonly #poll: Poll<Histograms>;
  #shown: Histogram | undefined;
  #last: Histograms | undefined;
  #disk = '';

  constructor() {
    this.#reset = h('button', { type: 'button', class: 'quiet', id: 'histogram-reset', click: () => void this.#startAnew() }, 'Begin anew');
    const place = h('div', { class: 'plot' });
    const body = h('tbody', {});
    this.#rows = new Parts(body, (row) => row.label, (row) => makeRow(row), (part, row) => {
      say(part.cells[0]!, row.count);
      say(part.cells[1]!, row.share);
    });
    const table = h(
      'table',
      { class: 'plain numbers', id: 'histogram-numbers' },
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'up to'), h('th', { scope: 'col' }, 'requests'), h('th', { scope: 'col' }, 'share'))),
      body,
    );
    this.root = h(
      'article',
      { class: 'card' },
      h('h3', {}, 'I/O pattern'),
      h('div', { class: 'row' }, this.#metric, this.#class, this.#reset),
      this.#text,
      h('figure', { class: 'chart', role: 'group', 'aria-label': 'Histogram; the numbers are in the table below' }, place),
      h('details', {}, h('summary', {}, 'As numbers'), table),
    );
    this.#plot = new uPlot(this.#config(), [[0], [0]], place);
    fit(this.#plot, place, HEIGHT);
    onTheme(() => this.#plot.redraw(false));
    this.#metric.addEventListener('change', () => this.#show());
    this.#class.addEventListener('change', () => this.#show());
    this.#poll = new Poll<Histograms>(2000, (found) => this.#take(found), (why) => say(this.#text, `No histograms: ${why}`));
  }

  show(disk: string): void {
    if (disk !== this.#disk) {
      this.#disk = disk;
      this.#last = undefined;
      say(this.#text, 'Asking …');
    }
    mark(this.#reset, 'disabled', currentRole() === 'admin' ? undefined : '');
    this.#poll.at(diskPath(disk, '/histograms'));
  }

  #take(found: Histograms): void {
    this.#last = found;
    this.#show();
  }

  #show(): void {
    const found = this.#last;
    const shown = found?.histograms.find((one) => one.metric === this.#metric.value && one.class === this.#class.value);
    if (!found || !shown) return;
    this.#shown = shown;
    const { buckets } = shown;
    const all = shown.count;
    say(
      this.#text,
      all === 0
        ? `No requests in ${duration(found.elapsed_ns / 1e9)}.`
        : `${shown.title}, ${shown.unit}: ${count(all)} in ${duration(found.elapsed_ns / 1e9)}, ` +
            `from ${count(shown.min ?? 0)} to ${count(shown.max ?? 0)}, mean ${count(shown.mean ?? 0)}`,
    );
    this.#plot.setData([buckets.map((_, index) => index), buckets.map((bucket) => (all > 0 ? (100 * bucket.count) / all : 0))]);
    this.#rows.show(
      buckets.map((bucket, index) => ({
        label: `${this.#metric.value} ${index}`,
        bound: bucket.up_to === null ? 'more' : count(bucket.up_to).replace('-', '−'),
        count: count(bucket.count),
        share: all > 0 ? percent(bucket.count / all) : '–',
      })),
    );
  }

  async #startAnew(): Promise<void> {
    const disk = this.#disk;
    await confirm({
      title: `Clear the histograms of ${disk}`,
      rows: [],
      warnings: ['All counts of the histograms are cleared. Other figures do not change.'],
      verb: 'Begin anew',
      apply: async () => {
        this.#take(await ask<Histograms>('DELETE', diskPath(disk, '/histograms')));
        return [];
      },
    }).catch((error: unknown) => {
      if (!(error instanceof Refused)) throw error;
    });
  }

  #config(): uPlot.Options {
    const bars = uPlot.paths.bars?.({ size: [0.86, 60] });
    return {
      width: 320,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false, range: (_, __, high) => [-0.6, (high ?? 0) + 0.6] },
        y: { range: (_, __, high) => [0, Math.min(100, niceTop(high ?? 0))] },
      },
      axes: [
        axis({
          rotate: -90,
          size: 62,
          grid: { show: false },
          splits: () => (this.#shown?.buckets ?? []).map((_, index) => index),
          values: (_, splits) => splits.map((index) => this.#labelOf(index ?? 0)),
        }),
        axis({ size: 46, space: 36, values: (_, splits) => splits.map((value) => `${value} %`) }),
      ],
      series: [
        {},
        {
          stroke: () => color('--accent'),
          fill: () => color('--accent'),
          width: 0,
          points: { show: false },
          ...(bars ? { paths: bars } : {}),
        },
      ],
    };
  }

  #labelOf(index: number): string {
    const bucket = this.#shown?.buckets[index];
    if (!bucket || !this.#shown) return '';
    if (bucket.up_to === null) return 'more';
    return short(bucket.up_to, this.#shown.unit);
  }
}

interface Row {
  label: string;
  bound: string;
  count: string;
  share: string;
}

function makeRow(row: Row): { root: HTMLElement; cells: HTMLElement[] } {
  const cells = [h('td', { class: 'number' }), h('td', { class: 'number' })];
  return { root: h('tr', {}, h('th', { scope: 'row', class: 'number' }, row.bound), ...cells), cells };
}

/** Formats a bound in few characters. */
function short(value: number, unit: string): string {
  const size = Math.abs(value);
  const sign = value < 0 ? '−' : '';
  if (unit === 'bytes') return size % 1024 === 0 ? `${size / 1024} KiB` : size === 512 ? '512 B' : `<${(size + 1) / 1024} KiB`;
  if (unit === 'microseconds') return size >= 1000 ? `${size / 1000} ms` : `${size} µs`;
  return sign + (size >= 1000 ? `${size / 1000}k` : `${size}`);
}

function choice(name: string, options: [string, string][]): HTMLSelectElement {
  const labels: Record<string, string> = { metric: 'Histogram', class: 'Requests' };
  const items = options.map(([value, label]) => h('option', { value }, label));
  return h('select', { id: `histogram-${name}`, 'aria-label': labels[name] ?? name }, ...items);
}
