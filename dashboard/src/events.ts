// Following the daemon: server-sent events, read by hand because an EventSource cannot show a token. It connects again by itself, and says
// how things stand.

import { Refused, call } from './api';
import type { Snapshot } from './types';

export type Link =
  | { state: 'connecting' }
  | { state: 'live' }
  /** Trying again by itself. */
  | { state: 'lost'; why: string }
  /** Somebody has to give a token. */
  | { state: 'locked'; why: string };

/** No event for so long means that the connection is dead. */
const SILENCE_MS_MAX = 12_000;

/** Pauses before the next attempt. */
const PAUSES_MS = [300, 700, 1500, 3000, 5000];

export interface Listener {
  snapshot(snapshot: Snapshot): void;
  link(link: Link): void;
}

/** Never ends. Returns what to call when there is a token, or when it is worth trying at once. */
export function follow(listener: Listener): () => void {
  let wake = (): void => {};
  const run = async (): Promise<void> => {
    for (let failures = 0; ; ) {
      let link: Link;
      try {
        await once(listener, () => (failures = 0));
        link = { state: 'lost', why: 'the daemon has ended' };
      } catch (error) {
        link = explain(error);
      }
      listener.link(link);
      const pause = PAUSES_MS[Math.min(failures++, PAUSES_MS.length - 1)];
      await new Promise<void>((resolve) => {
        wake = resolve;
        if (link.state !== 'locked') setTimeout(resolve, pause);
      });
    }
  };
  void run();
  addEventListener('online', () => wake());
  return () => wake();
}

function explain(error: unknown): Link {
  if (error instanceof Refused) {
    if (error.status === 401) return { state: 'locked', why: error.problem.error };
    return { state: 'lost', why: error.message };
  }
  return { state: 'lost', why: 'the daemon does not answer' };
}

async function once(listener: Listener, isLive: () => void): Promise<void> {
  const stop = new AbortController();
  let timer = setTimeout(() => stop.abort(), SILENCE_MS_MAX);
  try {
    const answer = await call('GET', '/v1/events', undefined, stop.signal);
    if (!answer.body) throw new Error('no body');
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new Parser();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      for (const data of parser.take(value)) {
        clearTimeout(timer);
        timer = setTimeout(() => stop.abort(), SILENCE_MS_MAX);
        isLive();
        listener.link({ state: 'live' });
        listener.snapshot(JSON.parse(data) as Snapshot);
      }
    }
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
}

/** Pieces of text in, the data of whole `snapshot` events out (WHATWG HTML, 9.2.6). */
export class Parser {
  #rest = '';

  take(piece: string): string[] {
    const events = (this.#rest + piece).split('\n\n');
    this.#rest = events.pop() ?? '';
    return events.flatMap((event) => {
      const lines = event.split('\n');
      const of = (field: string): string[] =>
        lines.filter((line) => line.startsWith(`${field}:`)).map((line) => line.slice(field.length + 1).replace(/^ /, ''));
      return of('event')[0] === 'snapshot' ? [of('data').join('\n')] : [];
    });
  }
}
