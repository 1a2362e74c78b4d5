// Explains in a sentence which disk is slow, and why: the cause whose requests took most of the time.

import { CAUSES } from './causes';
import { bytes, count, percent, withMs } from './format';
import { sum, type Rates } from './rates';
import type { BackingState, Datastore, DiskNow } from './types';

export type Severity = 'bad' | 'warn' | 'ok' | 'idle';

export interface Verdict {
  severity: Severity;
  text: string;
}

/** Mean latencies above which a disk is reported as slow, and above which it gets a warning. */
export const SLOW_NS = 20e6;
export const LOOK_NS = 5e6;

const ORDER: readonly Severity[] = ['idle', 'ok', 'warn', 'bad'];

export function worseThan(one: Verdict, other: Verdict): boolean {
  return ORDER.indexOf(one.severity) > ORDER.indexOf(other.severity);
}

/** Returns the latency above which a datastore is throttled; Infinity if latency does not throttle it. */
export function lateFromNs(store: Datastore): number {
  if (store.control === 'knee') return store.knee_ns ?? store.latency_ms * 1e6;
  return store.control === 'auto' ? store.latency_ms * 1e6 : Infinity;
}

export function isLate(store: Datastore): boolean {
  return store.latency_ns > lateFromNs(store);
}

/** Returns a number for sorting by slowness. A disk that answers no requests is the slowest. */
export function slowness(verdict: Verdict, rates: Rates | undefined): number {
  return rates?.meanNs ?? (verdict.severity === 'bad' ? Infinity : -1);
}

export function verdict(now: DiskNow, rates: Rates | undefined, datastore: Datastore | undefined): Verdict {
  return standing(now) ?? moving(now, rates, datastore);
}

/** Returns a verdict that does not depend on the disk's requests. */
function standing({ disk, figures }: DiskNow): Verdict | undefined {
  if (disk.state === 'offline') return { severity: 'bad', text: `offline: ${disk.reason ?? 'its backing cannot be opened'}` };
  if (disk.state === 'removing') return { severity: 'warn', text: 'the disk is being removed' };
  const backing = backingVerdict(disk.backing_state);
  if (backing) return backing;
  if (!figures) return { severity: 'bad', text: 'the shard that serves the disk does not answer' };
  const cache = disk.cache;
  const why = cache?.reason ?? '';
  if (cache?.state === 'stalled') return { severity: 'bad', text: why || 'the flash of its cache does not answer in time' };
  if (cache?.state === 'fenced') return { severity: 'bad', text: why || 'all flash of its cache is fenced; requests go to the backing' };
  if (cache?.dirty && cache.dirty.lost > 0) {
    return { severity: 'bad', text: `flash lost ${bytes(cache.dirty.lost)} of dirty data, which the backing does not have` };
  }
  return undefined;
}

function moving(now: DiskNow, rates: Rates | undefined, datastore: Datastore | undefined): Verdict {
  const inFlight = now.figures?.in_flight ?? 0;
  if (!rates) return { severity: 'idle', text: 'waiting for the first figures' };
  if (rates.meanNs === undefined) {
    if (inFlight > 0) return { severity: 'bad', text: `${count(inFlight)} requests are in flight, and none is answered` };
    return { severity: 'idle', text: 'no requests' };
  }
  const failed = rates.byCause[CAUSES.findIndex((cause) => cause.id === 'error')] ?? 0;
  if (failed > 0) return { severity: 'bad', text: `${count(Math.max(1, failed))} requests per second fail` };
  const severity = rates.meanNs >= SLOW_NS ? 'bad' : rates.meanNs >= LOOK_NS ? 'warn' : 'ok';
  return { severity, text: reason(now, rates, datastore) };
}

/** Describes the cause that takes the most time, its mean latency, and the reason for it. */
function reason(now: DiskNow, rates: Rates, datastore: Datastore | undefined): string {
  const all = sum(rates.timeByCause);
  const most = rates.timeByCause.reduce((best, time, index) => (time > (rates.timeByCause[best] ?? 0) ? index : best), 0);
  const cause = CAUSES[most];
  const time = rates.timeByCause[most] ?? 0;
  const requests = rates.byCause[most] ?? 0;
  if (!cause || all <= 0 || requests <= 0) return 'its requests take no measurable time';
  const part = time / all;
  const each = time / requests;
  const whose = part > 0.995 ? 'all of its time' : `${percent(part)} of its time`;
  const phrase = now.disk.cache || cause.id !== 'past' ? cause.phrase : 'requests to the backing, because it has no cache';
  const behind = OF_FLASH.includes(cause.id) ? behindFlash(now, rates) : behindBacking(now, rates, datastore, each);
  return `${whose}: ${phrase}, ${withMs(each)} each${behind}`;
}

/** Causes whose requests do not wait for the backing. */
const OF_FLASH = ['memory', 'flash', 'write-back'];

/** Minimum mean wait that counts as a reason, nanoseconds. */
const WAIT_NS = 1e6;

function behindFlash({ disk, qos }: DiskNow, rates: Rates): string {
  const waits = rates.flashWaitNs ?? 0;
  const takes = rates.flashNs ?? 0;
  if (waits > WAIT_NS && waits > takes / 2) {
    const limit = qos?.flash_limit;
    return limit === undefined ? `; I/Os wait ${withMs(waits)} in the queue for flash` : `; its flash limit is ${count(limit)} units/s`;
  }
  if (takes >= LOOK_NS) return `; flash takes ${withMs(takes)}`;
  return disk.cache?.state === 'recovering' ? '; its cache is being recovered' : '';
}

function behindBacking({ disk, qos }: DiskNow, rates: Rates, datastore: Datastore | undefined, eachNs: number): string {
  const waits = rates.backingWaitNs ?? 0;
  const takes = rates.backingNs ?? 0;
  if (waits > WAIT_NS && waits > takes / 2) {
    const limit = qos?.limit;
    const isAtLimit = limit !== undefined && rates.backingUnits > 0.85 * limit;
    if (isAtLimit) return `; its limit of ${count(limit)} units/s throttles it`;
    if (qos?.bytes_limit !== undefined) return `; its limit of ${bytes(qos.bytes_limit)}/s throttles it`;
    return `; I/Os wait ${withMs(waits)} in the queue for the shared datastore ${qos?.datastore ?? ''}`;
  }
  if (datastore && isLate(datastore)) {
    return `; the datastore ${datastore.name} is slow (${withMs(datastore.latency_ns)})`;
  }
  if (disk.cache?.state === 'recovering') return '; its cache is being recovered';
  // If the backing takes all of the time, the mean latency is sufficient.
  return takes > 0 && eachNs > 1.5 * takes ? `; an I/O to the backing takes ${withMs(takes)}` : '';
}

/** Returns the problem of a backing, if there is one. */
function backingVerdict(state: BackingState | undefined): Verdict | undefined {
  switch (state?.state) {
    case 'slow': {
      const seconds = (state.oldest_request_ms / 1000).toFixed(1);
      return { severity: 'bad', text: `its backing answers slowly: the oldest of ${state.waiting_requests} requests has waited ${seconds} s` };
    }
    case 'failing': {
      const failed = `${state.failed_last_minute} requests failed in the last minute: ${state.last_error}`;
      return { severity: 'bad', text: `its backing answers with errors; ${failed}` };
    }
    case 'reconnecting': {
      const since = `reconnecting for ${state.since_seconds} s: ${state.last_error}`;
      return { severity: 'bad', text: `its backing is ${since}; ${state.waiting_requests} requests wait` };
    }
    case 'failed':
      return { severity: 'bad', text: `its backing failed ${state.since_seconds} s ago: ${state.last_error}` };
    default:
      return undefined;
  }
}
