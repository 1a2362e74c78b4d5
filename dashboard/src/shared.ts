// Shared caches of a pool: hob divides the pool's flash among them. A chart of their sizes over time, and a table of what the present
// sizes are worth.

import { TimeChart, type Line } from './charts';
import { Parts, h, mark, say } from './dom';
import { NOTHING, bytes, count, percent, signed } from './format';
import type { Division, DivisionPoint } from './history';
import type { Cache, SharedCache, SharedCapacity } from './types';

/** Maximum number of disks with a layer of their own in the chart; the others are one layer. */
export const LAYERS_MAX = 12;

/** The disks of the layers, from the bottom; undefined for an unused layer. */
export type Layers = readonly (string | undefined)[];

/**
 * Returns the layers that show these points, given those that were shown last. The disks with the most flash in the period have layers
 * of their own. A disk keeps its layer, and with it its colour.
 */
export function layersOf(last: Layers, points: readonly DivisionPoint[]): Layers {
  const totals = new Map<string, number>();
  for (const { division } of points) {
    division?.sizes.forEach((size, disk) => totals.set(disk, (totals.get(disk) ?? 0) + size));
  }
  const byTotal = [...totals].sort(([one, a], [other, b]) => b - a || one.localeCompare(other));
  const shown = byTotal.slice(0, LAYERS_MAX).map(([disk]) => disk);
  const added = shown.filter((disk) => !last.includes(disk)).sort((one, other) => one.localeCompare(other));
  return Array.from({ length: LAYERS_MAX }, (_, index) => {
    const disk = last[index];
    return disk !== undefined && shown.includes(disk) ? disk : added.shift();
  });
}

/** Returns the size of the caches without a layer of their own. */
export function otherSize(layers: Layers, { used, sizes }: Division): number {
  return layers.reduce((left, disk) => left - ((disk !== undefined && sizes.get(disk)) || 0), used);
}

/** Describes the size of a cache: `12 GiB (shared, target 14 GiB)`. */
export function sizeOf(cache: Cache): string {
  if (!cache.shared) return bytes(cache.room);
  const { target, limits } = cache.shared;
  const parts = ['shared'];
  if (target > 0) parts.push(`target ${bytes(target)}`);
  if (limits.min > 0) parts.push(`at least ${bytes(limits.min)}`);
  if (limits.max > 0) parts.push(`at most ${bytes(limits.max)}`);
  if (limits.shares !== 1000) parts.push(`${count(limits.shares)} shares`);
  if (limits.pin) parts.push('pinned');
  return `${bytes(cache.room)} (${parts.join(', ')})`;
}

interface Column {
  heading: string;
  unit: string;
  text: (cache: SharedCache) => string;
}

const COLUMNS: readonly Column[] = [
  { heading: 'Size', unit: '', text: (cache) => bytes(cache.size) },
  { heading: 'Target', unit: '', text: (cache) => (cache.target > 0 ? bytes(cache.target) : NOTHING) },
  { heading: 'Reads/s', unit: '', text: (cache) => count(cache.reads_per_second) },
  { heading: 'Hits', unit: 'of reads', text: (cache) => percent(cache.hit_permille / 1000) },
  { heading: 'Hits/s', unit: 'with 1/16 more', text: (cache) => signed(cache.more_hits_per_second) },
  { heading: 'Hits/s', unit: 'more than equal parts', text: (cache) => signed(cache.gained_hits_per_second) },
];

/** The part of a pool's card that is about its shared caches. */
export class SharedPart {
  readonly root: HTMLElement;
  readonly #facts = h('p', { class: 'facts' });
  readonly #chart: TimeChart<DivisionPoint>;
  readonly #rows: Parts<SharedCache, { root: HTMLElement; show: (cache: SharedCache) => void }>;
  #layers: Layers = [];

  constructor() {
    const own = Array.from({ length: LAYERS_MAX }, (_, index) =>
      layer(() => this.#layers[index] ?? '', `--layer-${index + 1}`, ({ sizes }) => sizes.get(this.#layers[index] ?? '') ?? 0),
    );
    this.#chart = new TimeChart<DivisionPoint>({
      title: 'Shared capacity',
      unit: 'size of each cache',
      lines: [
        ...own,
        layer('other', '--layer-other', (division) => otherSize(this.#layers, division)),
        layer('free', '--layer-free', ({ size, used }) => size - used),
      ],
      format: bytes,
      isStacked: true,
      isSparse: true,
      isBytes: true,
    });
    const body = h('tbody', {});
    this.#rows = new Parts(body, (cache) => cache.disk, (cache) => makeRow(cache.disk), (row, cache) => row.show(cache));
    const headings = COLUMNS.map(({ heading, unit }) => h('th', { scope: 'col', class: 'number' }, heading, unit && h('small', {}, unit)));
    const table = h('table', { class: 'plain' }, h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Disk'), ...headings)), body);
    this.root = h(
      'div',
      { class: 'shared' },
      h('h3', {}, 'Shared caches'),
      this.#facts,
      h('div', { class: 'charts' }, this.#chart.root, h('div', { class: 'scroll' }, table)),
    );
  }

  show(shared: SharedCapacity | undefined, points: readonly DivisionPoint[]): void {
    mark(this.root, 'hidden', shared ? undefined : '');
    if (!shared) return;
    const caches = shared.caches.length === 1 ? '1 cache' : `${count(shared.caches.length)} caches`;
    say(
      this.#facts,
      `hob divides ${bytes(shared.size)} among ${caches} · ${bytes(shared.moved)} moved between caches since the daemon started · ` +
        `${bytes(shared.destaged)} of dirty data destaged for moves`,
    );
    this.#layers = layersOf(this.#layers, points);
    this.#chart.show(points);
    this.#rows.show(shared.caches);
  }
}

/** Creates a layer of the chart from the division at each point. */
function layer(label: Line['label'], color: string, value: (division: Division) => number): Line<DivisionPoint> {
  return { label, color, value: ({ division }) => division && value(division) };
}

function makeRow(disk: string): { root: HTMLElement; show: (cache: SharedCache) => void } {
  const cells = COLUMNS.map(() => h('td', { class: 'number' }));
  const root = h('tr', { 'data-disk': disk }, h('th', { scope: 'row', class: 'path' }, disk), ...cells);
  const show = (cache: SharedCache): void => COLUMNS.forEach((column, index) => say(cells[index]!, column.text(cache)));
  return { root, show };
}
