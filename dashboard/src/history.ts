// The rates of each disk, and the sizes of the shared caches of each pool, since the page was opened: a point for each snapshot, for
// at most ten minutes, with gaps where snapshots are missing.

import { between, sum, type Rates } from './rates';
import type { DiskNow, Figures, PoolNow, SharedCapacity, Snapshot } from './types';

/** Maximum number of points. */
export const POINTS_MAX = 600;

/** Number of seconds for the means in tables. */
const WINDOW_S = 5;

/** Seconds between two snapshots from which there is a gap between their points: more than two snapshots are missing. */
const GAP_S = 3.5;

export interface Point {
  /** Seconds since 1970. */
  at: number;
  /** Undefined in a gap. */
  rates: Rates | undefined;
}

export class History {
  readonly points: Point[] = [];
  #recent: { at: number; figures: Figures }[] = [];
  /** Mean rates of the last seconds. */
  recent: Rates | undefined;

  take(at: number, now: DiskNow): void {
    const figures = now.figures;
    const last = this.#recent.at(-1);
    // In a gap only a mean is known, which is not a point.
    const isGap = last !== undefined && at - last.at > GAP_S;
    const rates = isGap ? undefined : between(last?.figures, figures);
    this.points.push({ at, rates });
    if (this.points.length > POINTS_MAX) this.points.shift();
    if (!figures || isGap || (last && figures.elapsed_ns <= last.figures.elapsed_ns)) this.#recent = [];
    if (figures) this.#recent.push({ at, figures });
    while (this.#recent.length > 2 && at - this.#recent[1]!.at >= WINDOW_S) this.#recent.shift();
    this.recent = between(this.#recent[0]?.figures, figures);
  }
}

/** How the shared caches of a pool divide it, in bytes. */
export interface Division {
  /** Sizes of the caches, and free space. */
  size: number;
  /** Sum of the sizes of the caches. */
  used: number;
  /** Sizes of the caches, by disk. */
  sizes: ReadonlyMap<string, number>;
}

export interface DivisionPoint {
  /** Seconds since 1970. */
  at: number;
  /** Undefined in a gap, and while the pool has no shared caches. */
  division: Division | undefined;
}

export class PoolHistory {
  readonly points: DivisionPoint[] = [];

  take(at: number, { pool }: PoolNow): void {
    const last = this.points.at(-1);
    const isGap = last !== undefined && at - last.at > GAP_S;
    this.points.push({ at, division: isGap ? undefined : divisionOf(pool.shared) });
    if (this.points.length > POINTS_MAX) this.points.shift();
  }
}

function divisionOf(shared: SharedCapacity | undefined): Division | undefined {
  if (!shared) return undefined;
  const sizes = new Map(shared.caches.map((cache) => [cache.disk, cache.size]));
  return { size: shared.size, used: sum([...sizes.values()]), sizes };
}

/** Histories of all disks and pools. */
export class Histories {
  readonly #disks = new Map<string, History>();
  readonly #pools = new Map<string, PoolHistory>();

  take(snapshot: Snapshot): void {
    const at = snapshot.at_ms / 1000;
    forget(this.#disks, snapshot.disks.map((now) => now.disk.name));
    forget(this.#pools, snapshot.pools.map((now) => now.pool.name));
    for (const now of snapshot.disks) this.of(now.disk.name).take(at, now);
    for (const now of snapshot.pools) this.ofPool(now.pool.name).take(at, now);
  }

  of(disk: string): History {
    return known(this.#disks, disk, () => new History());
  }

  ofPool(pool: string): PoolHistory {
    return known(this.#pools, pool, () => new PoolHistory());
  }
}

function known<T>(all: Map<string, T>, name: string, make: () => T): T {
  const found = all.get(name) ?? make();
  all.set(name, found);
  return found;
}

/** Removes all histories except those of `names`. */
function forget(all: Map<string, unknown>, names: string[]): void {
  const kept = new Set(names);
  for (const name of all.keys()) if (!kept.has(name)) all.delete(name);
}
