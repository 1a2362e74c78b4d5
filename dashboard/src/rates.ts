// Rates per second between two snapshots.

import { CAUSE_COUNT, causeOf } from './causes';
import type { Figures, Io } from './types';

export interface Rates {
  /** Length of the interval, seconds. */
  seconds: number;
  iops: number;
  reads: number;
  writes: number;
  readBytes: number;
  writeBytes: number;
  /** Shares of the reads, 0 to 1; undefined without reads. */
  flashHits: number | undefined;
  memoryHits: number | undefined;
  /** Mean latency of all requests; undefined without requests. */
  meanNs: number | undefined;
  p99Ns: number | undefined;
  /** Requests per second, by cause. */
  byCause: number[];
  /** Sum of the latencies per second, by cause, nanoseconds. */
  timeByCause: number[];
  /** I/Os to the backing: I/Os per second, units per second, mean latency, and mean time in the queue. */
  backingIos: number;
  backingUnits: number;
  backingNs: number | undefined;
  backingWaitNs: number | undefined;
  /** The same for I/Os to flash. */
  flashNs: number | undefined;
  flashWaitNs: number | undefined;
  destagedBytes: number;
}

/** Returns undefined if a counter was reset, or if no time has passed. */
export function between(before: Figures | undefined, after: Figures | undefined): Rates | undefined {
  if (!before || !after || after.elapsed_ns <= before.elapsed_ns) return undefined;
  const seconds = (after.elapsed_ns - before.elapsed_ns) / 1e9;
  const each = (was: number, is: number): number => Math.max(0, is - was) / seconds;
  const byCause = new Array<number>(CAUSE_COUNT).fill(0);
  const timeByCause = new Array<number>(CAUSE_COUNT).fill(0);
  const known = new Map(before.outcomes.map((outcome) => [`${outcome.class}/${outcome.reason}`, outcome]));
  for (const outcome of after.outcomes) {
    const was = known.get(`${outcome.class}/${outcome.reason}`);
    const cause = causeOf(outcome);
    byCause[cause]! += each(was?.count ?? 0, outcome.count);
    timeByCause[cause]! += each(was?.latency_sum_ns ?? 0, outcome.latency_sum_ns);
  }
  const iops = sum(byCause);
  const reads = each(before.reads, after.reads);
  const [toBacking, toFlash] = [io(before.backing, after.backing), io(before.flash, after.flash)];
  const hits = each(before.read_hits, after.read_hits);
  const inMemory = each(before.memory_hits, after.memory_hits);
  return {
    seconds,
    iops,
    reads,
    writes: each(before.writes, after.writes),
    readBytes: each(before.read_bytes, after.read_bytes),
    writeBytes: each(before.write_bytes, after.write_bytes),
    flashHits: reads > 0 ? hits / reads : undefined,
    memoryHits: reads > 0 ? inMemory / reads : undefined,
    meanNs: iops > 0 ? sum(timeByCause) / iops : undefined,
    p99Ns: quantile(before.latency, after.latency, 0.99),
    byCause,
    timeByCause,
    backingIos: toBacking.ios / seconds,
    backingUnits: toBacking.units / seconds,
    backingNs: toBacking.takesNs,
    backingWaitNs: toBacking.waitsNs,
    flashNs: toFlash.takesNs,
    flashWaitNs: toFlash.waitsNs,
    destagedBytes: each(before.destaged_bytes, after.destaged_bytes),
  };
}

/** Returns the rate of I/Os and their mean latency. */
function io(before: Io, after: Io): { ios: number; units: number; takesNs: number | undefined; waitsNs: number | undefined } {
  const ios = Math.max(0, after.ios - before.ios);
  return {
    ios,
    units: Math.max(0, after.units - before.units),
    takesNs: ios > 0 ? Math.max(0, after.total_ns - before.total_ns) / ios : undefined,
    waitsNs: ios > 0 ? Math.max(0, after.waited_ns - before.waited_ns) / ios : undefined,
  };
}

/** Returns the upper bound of the bucket with this quantile, like `hob top`. */
export function quantile(
  before: readonly [number, number][],
  after: readonly [number, number][],
  share: number,
): number | undefined {
  const was = new Map(before);
  const counts = after.map(([upTo, count]): [number, number] => [upTo, count - (was.get(upTo) ?? 0)]);
  const all = sum(counts.map(([, count]) => count));
  if (all <= 0) return undefined;
  const rank = Math.max(1, Math.ceil(share * all));
  let seen = 0;
  for (const [upTo, count] of counts) {
    seen += count;
    if (seen >= rank) return upTo;
  }
  return undefined;
}

export function sum(values: readonly number[]): number {
  return values.reduce((all, value) => all + value, 0);
}
