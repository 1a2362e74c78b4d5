// Datastores: latency of each, and the entitlement of its disks compared with the I/O they received.

import { Parts, h, mark, say } from './dom';
import { NOTHING, bytes, count, percent, shares, withMs } from './format';
import type { Histories } from './history';
import { sum } from './rates';
import type { Datastore, DiskNow, Snapshot } from './types';
import { isLate, lateFromNs } from './why';

interface Line {
  now: DiskNow;
  /** The disk's part of the shares of all active disks, and of the units that these received. */
  due: number | undefined;
  got: number | undefined;
  /** Mean time that its I/Os wait in the queue, nanoseconds. */
  waits: number;
  units: number | undefined;
}

interface StorePart {
  root: HTMLElement;
  show: (store: Datastore, lines: Line[]) => void;
}

export class Datastores {
  readonly root: HTMLElement;
  readonly #stores: Parts<{ store: Datastore; lines: Line[] }, StorePart>;
  readonly #empty = h('p', { class: 'empty' });
  #last: Datastore[] = [];

  constructor() {
    const list = h('div', { class: 'cards wide' });
    this.#stores = new Parts(list, ({ store }) => store.name, ({ store }) => make(store.name), (part, { store, lines }) => part.show(store, lines));
    this.root = h(
      'section',
      { 'aria-labelledby': 'stores-title' },
      h('h2', { id: 'stores-title' }, 'Datastores: entitlement and received I/O'),
      list,
      this.#empty,
    );
  }

  show(snapshot: Snapshot, histories: Histories): void {
    // If a shard does not answer, its datastores are missing; the page then shows the last known values.
    this.#last = snapshot.datastores ?? this.#last;
    const stores = this.#last.filter((store) => store.disks.length > 0);
    this.#stores.show(stores.map((store) => ({ store, lines: linesOf(store, snapshot, histories) })));
    say(this.#empty, stores.length ? '' : 'No disk is online, so no datastore is in use.');
  }
}

export function linesOf(store: Datastore, snapshot: Snapshot, histories: Histories): Line[] {
  const on = snapshot.disks.filter((now) => store.disks.includes(now.disk.name));
  const lines = on.map((now) => {
    const rates = histories.of(now.disk.name).recent;
    return { now, units: rates?.backingUnits, waits: rates?.backingWaitNs ?? 0 };
  });
  const wants = lines.filter((line) => (line.units ?? 0) > 0);
  const allShares = sum(wants.map(({ now }) => now.qos?.shares ?? 0));
  const allUnits = sum(wants.map(({ units }) => units ?? 0));
  return lines.map((line) => ({
    ...line,
    due: wants.includes(line) && allShares > 0 ? (line.now.qos?.shares ?? 0) / allShares : undefined,
    got: wants.includes(line) && allUnits > 0 ? (line.units ?? 0) / allUnits : undefined,
  }));
}

function make(name: string): StorePart {
  const text = h('p', { class: 'facts' });
  const body = h('tbody', {});
  const rows = new Parts(body, (line: Line) => line.now.disk.name, (line) => makeLine(line.now.disk.name), (part, line) => part.show(line));
  const heading = (label: string, unit = '', name = ''): HTMLElement => h('th', { scope: 'col', class: name }, label, unit && h('small', {}, unit));
  const root = h(
    'article',
    { class: 'card', 'data-datastore': name },
    h('h3', {}, name),
    text,
    h(
      'div',
      { class: 'scroll' },
      h(
        'table',
        { class: 'plain due' },
        h('thead', {}, h('tr', {}, heading('Disk'), heading('Shares'), heading('Due', 'and received'), heading('Received', 'units/s', 'number'), heading('Reserved', 'units/s', 'number'), heading('Limit'))),
        body,
      ),
    ),
  );
  const show = (store: Datastore, lines: Line[]): void => {
    mark(root, 'data-severity', isLate(store) ? 'bad' : undefined);
    say(text, describe(store));
    rows.show(lines);
  };
  return { root, show };
}

function describe(store: Datastore): string {
  const parts: string[] = [];
  if (store.control === 'off') parts.push('not throttled, so shares have no effect (see hob datastore set)');
  else if (store.control === 'auto') parts.push(`throttled above ${store.latency_ms} ms`);
  else if (store.control === 'knee') {
    const found = store.knee_ns === undefined ? ', until its knee is measured' : ', its knee: more load adds little throughput';
    parts.push(`throttled above ${withMs(lateFromNs(store))}${found}`);
  }
  else parts.push(`at most ${store.control.replace('depth:', '')} I/Os in flight`);
  if (store.latency_ns > 0) parts.push(`latency ${withMs(store.latency_ns)}${isLate(store) ? ', too high' : ''}`);
  if (store.control !== 'off') {
    const window = store.window === undefined ? '' : ` of ${count(store.window)}`;
    parts.push(`${count(store.in_flight)}${window} I/Os in flight, ${count(store.waiting)} wait`);
  }
  const can = store.capacity ?? (store.peak > 0 ? store.peak : undefined);
  if (can !== undefined) parts.push(`${store.capacity ? 'configured capacity' : 'highest measured rate'} ${count(can)} units/s, ${count(store.reserved)} reserved`);
  return parts.join(' · ');
}

/** Mean wait below which a disk counts as served without delay, nanoseconds. */
const WAITS_NS = 0.2e6;

/** Describes whether a disk gets its entitlement. A disk without waiting I/O gets all it demands. */
function outcome(line: Line): string {
  if (line.due === undefined) return 'no I/O';
  const received = `entitled to ${percent(line.due)}, received ${percent(line.got)}`;
  return line.waits < WAITS_NS ? `${received}: no I/O waits` : `${received}; its I/Os wait ${withMs(line.waits)}`;
}

function makeLine(name: string): { root: HTMLElement; show: (line: Line) => void } {
  const [setTo, units, reserved, limit] = [h('td', {}), h('td', { class: 'number' }), h('td', { class: 'number' }), h('td', {})];
  const [due, got] = [h('i', { class: 'due' }), h('i', { class: 'got' })];
  const label = h('small', {});
  const pair = h('td', { class: 'pair' }, h('div', { class: 'bar' }, due), h('div', { class: 'bar' }, got), label);
  const root = h('tr', { 'data-disk': name }, h('th', { scope: 'row' }, name), setTo, pair, units, reserved, limit);
  const show = (line: Line): void => {
    const qos = line.now.qos;
    say(setTo, qos ? `${shares(qos.shares)}${qos.policy ? `, ${qos.policy}` : ''}` : NOTHING);
    due.style.width = `${100 * (line.due ?? 0)}%`;
    got.style.width = `${100 * (line.got ?? 0)}%`;
    say(label, outcome(line));
    say(units, count(line.units));
    say(reserved, qos?.reservation ? count(qos.reservation) : NOTHING);
    const limits = [qos?.limit && `${count(qos.limit)} units/s`, qos?.bytes_limit && `${bytes(qos.bytes_limit)}/s`].filter(Boolean);
    say(limit, limits.length ? limits.join(', ') : NOTHING);
  };
  return { root, show };
}
