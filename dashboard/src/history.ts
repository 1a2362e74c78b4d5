// The rates of each disk since the page was opened: a point for each snapshot, for at most ten minutes, with gaps where snapshots are
// missing.

import { between, type Rates } from './rates';
import type { DiskNow, Figures, Snapshot } from './types';

/** Maximum number of points. */
export const POINTS_MAX = 600;

/** Number of seconds for the means in tables. */
const WINDOW_S = 5;

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
    // If more than two snapshots are missing, only a mean is known, which is not a point.
    const isGap = last !== undefined && at - last.at > 3.5;
    const rates = isGap ? undefined : between(last?.figures, figures);
    this.points.push({ at, rates });
    if (this.points.length > POINTS_MAX) this.points.shift();
    if (!figures || isGap || (last && figures.elapsed_ns <= last.figures.elapsed_ns)) this.#recent = [];
    if (figures) this.#recent.push({ at, figures });
    while (this.#recent.length > 2 && at - this.#recent[1]!.at >= WINDOW_S) this.#recent.shift();
    this.recent = between(this.#recent[0]?.figures, figures);
  }
}

/** Histories of all disks. */
export class Histories {
  readonly #known = new Map<string, History>();

  take(snapshot: Snapshot): void {
    const gone = new Set(this.#known.keys());
    for (const now of snapshot.disks) {
      gone.delete(now.disk.name);
      this.of(now.disk.name).take(snapshot.at_ms / 1000, now);
    }
    gone.forEach((name) => this.#known.delete(name));
  }

  of(disk: string): History {
    let history = this.#known.get(disk);
    if (!history) {
      history = new History();
      this.#known.set(disk, history);
    }
    return history;
  }
}
