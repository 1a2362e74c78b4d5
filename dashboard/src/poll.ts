// Queries a path of the API repeatedly, while the page is visible, for data that is too large for the event stream.

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

  /** Changes the path of the queries. */
  at(path: string): void {
    if (path === this.#path) return;
    this.#path = path;
    this.again();
  }

  /** Sends a query now. */
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
      // If there is no answer, the top of the page shows that.
      if (path === this.#path && error instanceof Refused) this.failed(error.problem.error);
    }
    if (path !== this.#path) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => void this.#ask(), this.everyMs);
  }
}
