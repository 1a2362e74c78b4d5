// Pools: size, state and I/O of each flash device, and the shared caches.

import { Parts, h, say } from './dom';
import { NOTHING, bytes, count, iops, mib, percent } from './format';
import type { Histories } from './history';
import { SharedPart } from './shared';
import type { DeviceFigures, FlashWritesUsage, PoolNow, Snapshot } from './types';

interface PoolPart {
  root: HTMLElement;
  show: (now: PoolNow) => void;
}

/** Counts of a device in the previous snapshot, from which the rates are computed. */
type Seen = Map<string, { atMs: number; figures: DeviceFigures }>;

export class Pools {
  readonly root: HTMLElement;
  readonly #pools: Parts<PoolNow, PoolPart>;
  readonly #empty = h('p', { class: 'empty' });
  #histories: Histories | undefined;
  #seen: Seen = new Map();
  #next: Seen = new Map();
  #atMs = 0;

  constructor() {
    const list = h('div', { class: 'cards' });
    this.#pools = new Parts(list, (now) => now.pool.name, (now) => this.#make(now), (part, now) => part.show(now));
    this.root = h('section', { 'aria-labelledby': 'pools-title' }, h('h2', { id: 'pools-title' }, 'Flash pools'), list, this.#empty);
  }

  show(snapshot: Snapshot, histories: Histories): void {
    this.#histories = histories;
    this.#atMs = snapshot.at_ms;
    this.#next = new Map();
    this.#pools.show(snapshot.pools);
    this.#seen = this.#next;
    say(this.#empty, snapshot.pools.length ? '' : 'There is no pool. Create one: hob pool create NAME DEVICE…');
  }

  #make({ pool: { name } }: PoolNow): PoolPart {
    const fill = h('i', {});
    fill.style.background = 'var(--accent)';
    const text = h('span', {});
    const writes = h('span', {});
    const body = h('tbody', {});
    const devices = new Parts(
      body,
      (row: DeviceRow) => row.path,
      (row) => makeDevice(row.path),
      (part, row) => part.show(row),
    );
    const shared = new SharedPart();
    const heading = (label: string, unit = '', name = 'number'): HTMLElement => h('th', { scope: 'col', class: name }, label, unit && h('small', {}, unit));
    const root = h(
      'article',
      { class: 'card', 'data-pool': name },
      h('h3', {}, name),
      h('div', { class: 'bar tall' }, fill),
      h('p', { class: 'facts' }, text),
      h('p', { class: 'facts', 'data-flash-writes': '' }, writes),
      h(
        'div',
        { class: 'scroll' },
        h(
          'table',
          { class: 'plain' },
          h('thead', {}, h('tr', {}, heading('Device', '', ''), heading('State', '', ''), heading('Free'), heading('I/O', 'IOPS'), heading('Read', 'MiB/s'), heading('Written', 'MiB/s'))),
          body,
        ),
      ),
      shared.root,
    );
    const show = ({ pool, devices: figures }: PoolNow): void => {
      const used = pool.size - pool.free;
      fill.style.width = `${pool.size > 0 ? (100 * used) / pool.size : 0}%`;
      const orphans = pool.orphans?.length ? `; ${count(pool.orphans.length)} caches belong to no disk (orphans)` : '';
      const who = pool.caches.length ? `caches of ${pool.caches.length} disks` : 'no caches';
      say(text, `${bytes(used)} of ${bytes(pool.size)} allocated to ${who}, ${bytes(pool.free)} free${orphans}`);
      devices.show(
        pool.devices.map((device, index) => ({ path: device.path, device, rates: this.#rates(`${name} ${device.path}`, figures[index] ?? undefined) })),
      );
      say(writes, flashWrites(pool.flash_writes));
      writes.classList.toggle('state-bad', (pool.flash_writes?.debt ?? 0) > 0);
      shared.show(pool.shared, this.#histories?.ofPool(name).points ?? []);
    };
    return { root, show };
  }

  #rates(key: string, figures: DeviceFigures | undefined): DeviceRates | undefined {
    if (!figures) return undefined;
    this.#next.set(key, { atMs: this.#atMs, figures });
    const before = this.#seen.get(key);
    const seconds = before ? (this.#atMs - before.atMs) / 1000 : 0;
    if (!before || seconds <= 0 || figures.ios < before.figures.ios) return undefined;
    return {
      ios: (figures.ios - before.figures.ios) / seconds,
      read: (figures.read_bytes - before.figures.read_bytes) / seconds,
      written: (figures.written_bytes - before.figures.written_bytes) / seconds,
    };
  }
}

/** Describes the flash writes of a pool, and their budget. */
function flashWrites(writes: FlashWritesUsage | undefined): string {
  if (!writes) return '';
  const hours = Math.floor(writes.covered_seconds / 3600);
  const since = writes.covered_seconds >= 86_000 ? '24 h' : hours > 0 ? `${hours} h` : `${Math.ceil(writes.covered_seconds / 60)} min`;
  const written = `${bytes(writes.written_day)} written to flash in the last ${since}`;
  if (writes.budget === undefined) return `${written}; no flash write budget`;
  const left = writes.debt > 0 ? `exceeded by ${bytes(writes.debt)}` : `${bytes(writes.saved)} left`;
  return `${written}; the flash write budget is ${bytes(writes.bytes_per_day)} a day (${writes.budget}), ${left}`;
}

interface DeviceRates {
  ios: number;
  read: number;
  written: number;
}

interface DeviceRow {
  path: string;
  device: PoolNow['pool']['devices'][number];
  rates: DeviceRates | undefined;
}

function makeDevice(path: string): { root: HTMLElement; show: (row: DeviceRow) => void } {
  const cells = Array.from({ length: 5 }, (_, index) => h('td', { class: index > 0 ? 'number' : '' }));
  const root = h('tr', {}, h('th', { scope: 'row', class: 'path', title: path }, path), ...cells);
  const show = ({ device, rates }: DeviceRow): void => {
    const out = device.admission === 'out' ? ', allocation off' : '';
    const through = device.io === 'buffered' ? ', uses the page cache' : '';
    const texts = [
      `${device.state}${device.reason ? `: ${device.reason}` : ''}${out}${through}`,
      device.size > 0 ? `${bytes(device.free)} (${percent(device.free / device.size)})` : NOTHING,
      iops(rates?.ios),
      mib(rates?.read),
      mib(rates?.written),
    ];
    cells[0]!.classList.toggle('state-bad', device.state !== 'online');
    cells.forEach((cell, index) => say(cell, texts[index] ?? ''));
  };
  return { root, show };
}
