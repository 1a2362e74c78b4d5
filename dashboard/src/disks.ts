// The table of disks, slowest first, with the time by cause. Rows keep their positions while the user points at them.

import { CAUSES } from './causes';
import { Spark } from './charts';
import { Parts, h, mark, say } from './dom';
import { NOTHING, bytes, iops, mib, ms, percent } from './format';
import type { Histories } from './history';
import { sum, type Rates } from './rates';
import type { Datastore, DiskNow, Snapshot } from './types';
import { slowness, verdict, type Verdict } from './why';

/** Maximum number of rows; the search box finds the others. */
const ROWS_MAX = 200;

/** Minimum time between changes of the order. */
const SORT_MS = 4000;

interface Row {
  now: DiskNow;
  rates: Rates | undefined;
  verdict: Verdict;
}

interface Column {
  id: string;
  heading: string;
  unit: string;
  /** Sort key: the greatest first; text in alphabetical order. */
  rank: (row: Row) => number | string;
  text?: (row: Row) => string;
}

const hits = (rates: Rates | undefined): number | undefined =>
  rates?.flashHits === undefined ? undefined : rates.flashHits + (rates.memoryHits ?? 0);

const COLUMNS: readonly Column[] = [
  { id: 'disk', heading: 'Disk', unit: '', rank: (row) => row.now.disk.name },
  { id: 'latency', heading: 'Mean', unit: 'ms', rank: (row) => slowness(row.verdict, row.rates), text: (row) => ms(row.rates?.meanNs) },
  { id: 'p99', heading: '99 %', unit: 'ms', rank: (row) => row.rates?.p99Ns ?? -1, text: (row) => ms(row.rates?.p99Ns) },
  { id: 'time', heading: 'Time by cause', unit: '', rank: (row) => sum(row.rates?.timeByCause ?? []) },
  { id: 'iops', heading: 'Requests', unit: 'IOPS', rank: (row) => row.rates?.iops ?? -1, text: (row) => iops(row.rates?.iops) },
  { id: 'hits', heading: 'Hits', unit: 'of reads', rank: (row) => hits(row.rates) ?? -1, text: (row) => percent(hits(row.rates)) },
  { id: 'read', heading: 'Read', unit: 'MiB/s', rank: (row) => row.rates?.readBytes ?? -1, text: (row) => mib(row.rates?.readBytes) },
  { id: 'write', heading: 'Written', unit: 'MiB/s', rank: (row) => row.rates?.writeBytes ?? -1, text: (row) => mib(row.rates?.writeBytes) },
  {
    id: 'dirty',
    heading: 'Dirty data',
    unit: '',
    rank: (row) => row.now.figures?.dirty_bytes ?? -1,
    text: (row) => (row.now.disk.cache?.mode === 'write-back' ? bytes(row.now.figures?.dirty_bytes) : NOTHING),
  },
];

interface Part {
  root: HTMLTableRowElement;
  show: (row: Row) => void;
}

export class Disks {
  readonly root: HTMLElement;
  readonly #rows: Parts<Row, Part>;
  readonly #filter = h('input', { type: 'search', id: 'filter', placeholder: 'Find a disk', 'aria-label': 'Find a disk', size: 16 });
  readonly #note = h('p', { class: 'empty' });
  readonly #body = h('tbody', {});
  readonly #headings = new Map<string, HTMLElement>();
  #column = 'latency';
  #isReversed = false;
  #order: string[] = [];
  #sortedAt = 0;
  #selected: string | undefined;
  #last: { snapshot: Snapshot; histories: Histories } | undefined;

  constructor(private readonly select: (disk: string) => void) {
    const head = h('tr', {});
    for (const column of COLUMNS) {
      const button = h('button', { type: 'button', click: () => this.#sortBy(column.id) }, column.heading, column.unit && h('small', {}, column.unit));
      const cell = h('th', { scope: 'col', class: `c-${column.id}` }, button);
      this.#headings.set(column.id, cell);
      head.append(cell);
    }
    const table = h('table', { class: 'disks', id: 'disks' }, h('thead', {}, head), this.#body);
    this.#filter.addEventListener('input', () => this.#again());
    this.#rows = new Parts(this.#body, (row) => row.now.disk.name, (row) => this.#make(row), (part, row) => part.show(row));
    this.root = h(
      'section',
      { 'aria-labelledby': 'disks-title' },
      h('div', { class: 'head' }, h('h2', { id: 'disks-title' }, 'Disks'), legend(), this.#filter),
      table,
      this.#note,
    );
    this.#body.addEventListener('keydown', (event) => this.#move(event));
  }

  show(snapshot: Snapshot, histories: Histories, selected: string | undefined): void {
    this.#last = { snapshot, histories };
    this.#selected = selected;
    const stores = new Map<string, Datastore>((snapshot.datastores ?? []).map((store) => [store.name, store]));
    const wanted = this.#filter.value.trim().toLowerCase();
    const rows = snapshot.disks
      .filter((now) => now.disk.name.toLowerCase().includes(wanted))
      .map((now): Row => {
        const rates = histories.of(now.disk.name).recent;
        return { now, rates, verdict: verdict(now, rates, stores.get(now.qos?.datastore ?? '')) };
      });
    const sorted = this.#sort(rows);
    this.#rows.show(sorted.slice(0, ROWS_MAX));
    say(this.#note, noteOf(snapshot.disks.length, sorted.length));
    for (const [id, cell] of this.#headings) {
      const isAscending = (id === 'disk') !== this.#isReversed;
      mark(cell, 'aria-sort', id === this.#column ? (isAscending ? 'ascending' : 'descending') : undefined);
    }
  }

  #again(): void {
    this.#sortedAt = 0;
    if (this.#last) this.show(this.#last.snapshot, this.#last.histories, this.#selected);
  }

  #sortBy(id: string): void {
    this.#isReversed = id === this.#column && !this.#isReversed;
    this.#column = id;
    this.#again();
  }

  /** Returns the rows in order. Keeps the previous order while it is recent, or while the user points at a row. */
  #sort(rows: Row[]): Row[] {
    const isHeld = this.#body.matches(':hover') || this.#body.contains(document.activeElement);
    if (this.#sortedAt > 0 && (isHeld || performance.now() - this.#sortedAt < SORT_MS)) {
      const place = new Map(this.#order.map((name, index) => [name, index]));
      const at = (row: Row): number => place.get(row.now.disk.name) ?? Infinity;
      return rows.sort((one, other) => (at(one) === at(other) ? 0 : at(one) - at(other)));
    }
    const rank = COLUMNS.find((column) => column.id === this.#column)!.rank;
    const direction = this.#isReversed ? -1 : 1;
    rows.sort((one, other) => {
      const [a, b] = [rank(one), rank(other)];
      // The difference of two infinite values is not a number; they are equal.
      const order = typeof a === 'string' ? a.localeCompare(String(b)) : a === b ? 0 : Number(b) - a;
      return direction * order || one.now.disk.name.localeCompare(other.now.disk.name);
    });
    // Until there are rates, the order may change at any time.
    this.#sortedAt = rows.some((row) => row.rates) ? performance.now() : 0;
    this.#order = rows.map((row) => row.now.disk.name);
    return rows;
  }

  #make({ now }: Row): Part {
    const name = now.disk.name;
    const button = h('button', { type: 'button', class: 'link', click: () => this.select(name) }, name);
    const state = h('small', { class: 'state' });
    const bar = h('div', { class: 'bar' });
    const segments = CAUSES.map((cause) => {
      const segment = h('i', { title: cause.label });
      segment.style.background = `var(${cause.color})`;
      bar.append(segment);
      return segment;
    });
    const why = h('div', { class: 'why' });
    const spark = new Spark();
    const cells = new Map<string, HTMLElement>();
    const root = h('tr', { 'data-disk': name, click: (event) => {
      if (!(event.target instanceof HTMLButtonElement)) this.select(name);
    } });
    for (const column of COLUMNS) {
      const cell =
        column.id === 'disk'
          ? h('th', { scope: 'row', class: 'c-disk' }, button, state)
          : column.id === 'time'
            ? h('td', { class: 'c-time' }, bar, why)
            : h('td', { class: `c-${column.id} number`, 'data-label': column.heading, 'data-unit': column.unit });
      if (column.text) cells.set(column.id, column.id === 'iops' ? cell.appendChild(h('span', {})) : cell);
      if (column.id === 'iops') cell.append(spark.root);
      root.append(cell);
    }
    const show = (row: Row): void => {
      mark(root, 'data-severity', row.verdict.severity);
      mark(root, 'aria-selected', name === this.#selected ? 'true' : undefined);
      say(state, stateOf(row.now));
      say(why, row.verdict.text);
      const all = sum(row.rates?.timeByCause ?? []);
      segments.forEach((segment, index) => {
        const share = all > 0 ? (row.rates?.timeByCause[index] ?? 0) / all : 0;
        segment.style.width = `${(100 * share).toFixed(2)}%`;
      });
      for (const column of COLUMNS) {
        const cell = cells.get(column.id);
        if (cell && column.text) say(cell, column.text(row));
      }
      spark.show(this.#last!.histories.of(name).points.map((point) => point.rates?.iops));
    };
    return { root, show };
  }

  /** The arrow keys up and down move between disks. */
  #move(event: KeyboardEvent): void {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const buttons = [...this.#body.querySelectorAll<HTMLButtonElement>('th button')];
    const at = buttons.findIndex((button) => button === document.activeElement);
    buttons[at + step]?.focus();
    event.preventDefault();
  }
}

function stateOf({ disk }: DiskNow): string {
  if (disk.state !== 'online') return disk.state;
  const cache = disk.cache;
  if (!cache) return 'no cache';
  if (cache.state === 'active') return `${cache.mode}, ${bytes(cache.room)}${cache.shared ? ' shared' : ''}`;
  return cache.state === 'none' ? 'no cache yet' : cache.state;
}

function noteOf(all: number, found: number): string {
  if (all === 0) return 'There are no disks. Add one: hob disk add NAME --backing PATH';
  if (found === 0) return 'No disk has this text in its name.';
  return found > ROWS_MAX ? `The first ${ROWS_MAX} of ${found} disks. Enter a part of a name to find others.` : '';
}

function legend(): HTMLElement {
  const entries = CAUSES.map((cause) => {
    const swatch = h('i', { class: 'swatch' });
    swatch.style.setProperty('--swatch', `var(${cause.color})`);
    return h('li', {}, swatch, cause.label);
  });
  return h('ul', { class: 'legend causes', 'aria-label': 'Colours' }, ...entries);
}
