// The top of the page: problems, the slowest disk with the reason, and totals of all disks.

import { Parts, h, mark, say } from './dom';
import { NOTHING, bytes, iops, mib, ms, percent, withMs } from './format';
import type { Histories } from './history';
import { sum } from './rates';
import type { HealthProblem, Snapshot } from './types';
import { slowness, verdict, worseThan, type Severity, type Verdict } from './why';

export class Overview {
  readonly root: HTMLElement;
  readonly #headline = h('p', { class: 'headline', id: 'headline' });
  readonly #problems: Parts<HealthProblem, ProblemPart>;
  readonly #tiles = new Map<string, HTMLElement>();

  constructor(private readonly select: (disk: string) => void) {
    const list = h('ul', { class: 'problems', id: 'problems', 'aria-label': 'Problems' });
    this.#problems = new Parts(
      list,
      (problem) => `${problem.kind} ${problem.subject}`,
      (problem): ProblemPart => {
        const text = h('span', {});
        const head = h('b', {}, `${problem.kind.replaceAll('-', ' ')}: ${problem.subject}`);
        return { root: h('li', { class: 'problem' }, head, ' ', text), text };
      },
      (part, problem) => say(part.text, problem.reason),
    );
    const tiles = h('dl', { class: 'tiles' });
    for (const [id, label, unit] of TILES) {
      const value = h('span', { id: `tile-${id}` }, NOTHING);
      tiles.append(h('div', { class: 'tile' }, h('dt', {}, label), h('dd', {}, value, unit && h('small', {}, unit))));
      this.#tiles.set(id, value);
    }
    this.root = h('section', { 'aria-label': 'All disks together' }, this.#headline, list, tiles);
  }

  show(snapshot: Snapshot, histories: Histories): void {
    this.#problems.show(snapshot.health.problems);
    this.#headlineOf(snapshot, histories);
    const rates = snapshot.disks.map((now) => histories.of(now.disk.name).recent);
    const all = (of: (rate: NonNullable<(typeof rates)[number]>) => number): number | undefined =>
      rates.some(Boolean) ? sum(rates.map((rate) => (rate ? of(rate) : 0))) : undefined;
    const total = all((rate) => rate.iops);
    const reads = all((rate) => rate.reads);
    const hits = all((rate) => rate.reads * ((rate.flashHits ?? 0) + (rate.memoryHits ?? 0)));
    const time = all((rate) => sum(rate.timeByCause));
    this.#tile('iops', iops(total));
    this.#tile('latency', total && time !== undefined ? ms(time / total) : NOTHING);
    this.#tile('hits', reads && hits !== undefined ? percent(hits / reads) : NOTHING);
    this.#tile('read', mib(all((rate) => rate.readBytes)));
    this.#tile('write', mib(all((rate) => rate.writeBytes)));
    this.#tile('backing', iops(all((rate) => rate.backingIos)));
    this.#tile('dirty', bytes(sum(snapshot.disks.map((now) => now.figures?.dirty_bytes ?? 0))));
  }

  #tile(id: string, text: string): void {
    say(this.#tiles.get(id)!, text);
  }

  #headlineOf(snapshot: Snapshot, histories: Histories): void {
    if (snapshot.disks.length === 0) {
      this.#say('idle', 'There are no disks yet. Add one with: hob disk add NAME --backing PATH');
      return;
    }
    let worst: { name: string; verdict: Verdict; slowness: number } | undefined;
    for (const now of snapshot.disks) {
      const { name } = now.disk;
      const rates = histories.of(name).recent;
      const datastore = snapshot.datastores?.find((store) => store.name === now.qos?.datastore);
      const why = verdict(now, rates, datastore);
      const found = { name, verdict: why, slowness: slowness(why, rates) };
      const isWorse =
        !worst ||
        worseThan(found.verdict, worst.verdict) ||
        (found.verdict.severity === worst.verdict.severity && found.slowness > worst.slowness);
      if (isWorse) worst = found;
    }
    if (!worst) return;
    const { name, verdict: why, slowness: mean } = worst;
    if (why.severity === 'idle') this.#say('idle', 'All disks are idle.');
    else if (mean < 0 || mean === Infinity) this.#say(why.severity, `: ${why.text}`, name);
    else if (why.severity === 'ok') this.#say('ok', ` is the slowest disk, with ${withMs(mean)}. No disk is slow.`, name);
    else this.#say(why.severity, ` ${why.severity === 'bad' ? 'is slow' : 'is the slowest'}, ${withMs(mean)}: ${why.text}`, name);
  }

  /** Shows a text, after the name of a disk if there is one. */
  #say(severity: Severity, text: string, disk?: string): void {
    mark(this.#headline, 'data-severity', severity);
    const known = this.#headline.querySelector('button');
    if (disk === undefined) {
      say(this.#headline, text);
      return;
    }
    if (known?.textContent !== disk) {
      const go = h('button', { type: 'button', class: 'link', click: () => this.select(disk) }, disk);
      this.#headline.replaceChildren(go, h('span', {}));
    }
    say(this.#headline.querySelector('span')!, text);
  }
}

const TILES: [string, string, string][] = [
  ['iops', 'Requests', 'IOPS'],
  ['latency', 'Mean latency', 'ms'],
  ['hits', 'Hit ratio of reads', ''],
  ['read', 'Read', 'MiB/s'],
  ['write', 'Written', 'MiB/s'],
  ['backing', 'To backings', 'IOPS'],
  ['dirty', 'Dirty data', ''],
];

interface ProblemPart {
  root: HTMLElement;
  text: HTMLElement;
}
