// Asking again and again for what is too large for the stream of events, while somebody can see it.

import { Refused, ask } from './api';

export class Poll<T> {
  #path: string | undefined;
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly everyMs: number,
    private readonly found: (answer: T) => void,
    private readonly failed: (why: string) => void,
  ) {
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this.again();
    });
  }

  /** Asks at that path from now on. */
  at(path: string): void {
    if (path === this.#path) return;
    this.#path = path;
    this.again();
  }

  /** Asks now. */
  again(): void {
    clearTimeout(this.#timer);
    void this.#ask();
  }

  async #ask(): Promise<void> {
    const path = this.#path;
    if (path === undefined || document.hidden) return;
    try {
      const answer = await ask<T>('GET', path);
      if (path === this.#path) this.found(answer);
    } catch (error) {
      // Without an answer at all, the top of the page says so.
      if (path === this.#path && error instanceof Refused) this.failed(error.problem.error);
    }
    if (path !== this.#path) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => void this.#ask(), this.everyMs);
  }
}
