// Receives server-sent events of the daemon. It does not use EventSource, which cannot send a token. It reconnects automatically, and
// reports the state of the connection.

import { Refused, call } from './api';
import type { Snapshot } from './types';

export type Link =
  | { state: 'connecting' }
  | { state: 'live' }
  /** The page reconnects automatically. */
  | { state: 'lost'; why: string }
  /** The user must enter a token. */
  | { state: 'locked'; why: string };

/** Time without an event after which the connection counts as lost. */
const SILENCE_MS_MAX = 12_000;

/** Delays before the next attempts. */
const PAUSES_MS = [300, 700, 1500, 3000, 5000];

export interface Listener {
  snapshot(snapshot: Snapshot): void;
  link(link: Link): void;
}

/** Runs until the page is closed. Returns a function that reconnects immediately. */
export function follow(listener: Listener): () => void {
  let wake = (): void => {};
  const run = async (): Promise<void> => {
    for (let failures = 0; ; ) {
      let link: Link;
      try {
        await once(listener, () => (failures = 0));
        link = { state: 'lost', why: 'the daemon closed the connection' };
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

/** Parses pieces of the event stream, and returns the data of complete `snapshot` events (WHATWG HTML, 9.2.6). */
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
