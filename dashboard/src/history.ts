// What the page has seen of each disk: a point for each snapshot, ten minutes at most. It begins when the page is opened, and has a gap
// where nothing was heard.

import { between, type Rates } from './rates';
import type { DiskNow, Figures, Snapshot } from './types';

/** Points that are kept. */
export const POINTS_MAX = 600;

/** Tables show means over so many seconds, so that they can be read. */
const WINDOW_S = 5;

export interface Point {
  /** Seconds since 1970. */
  at: number;
  /** Nothing at a gap. */
  rates: Rates | undefined;
}

export class History {
  readonly points: Point[] = [];
  #recent: { at: number; figures: Figures }[] = [];
  /** Over the last seconds. */
  recent: Rates | undefined;

  take(at: number, now: DiskNow): void {
    const figures = now.figures;
    const last = this.#recent.at(-1);
    // More than a snapshot or two is missing: what came in between is known as a mean only, and is no point.
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

/** The histories of all disks. */
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
