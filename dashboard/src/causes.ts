// What became of requests, in few groups that have a colour each: docs/outcomes.md has all of them.

import type { Outcome } from './types';

export interface Cause {
  id: string;
  /** In legends. */
  label: string;
  /** A request of it, in a sentence: "… of its time goes to …". */
  phrase: string;
  /** Its variable in app.css. */
  color: string;
}

/** Best first: charts stack them in this order from below. */
export const CAUSES: readonly Cause[] = [
  { id: 'memory', label: 'hit in memory', phrase: 'hits in memory', color: '--cause-memory' },
  { id: 'flash', label: 'hit in flash', phrase: 'hits in flash', color: '--cause-flash' },
  { id: 'write-back', label: 'write to flash', phrase: 'writes that flash takes', color: '--cause-write-back' },
  { id: 'flush', label: 'flush', phrase: 'flushes', color: '--cause-flush' },
  { id: 'write-through', label: 'write to backing', phrase: 'writes, which go to the backing', color: '--cause-write-through' },
  { id: 'miss', label: 'miss, kept', phrase: 'misses, read from the backing', color: '--cause-miss' },
  { id: 'refused-entry', label: 'miss, not kept', phrase: 'misses that are not admitted to flash', color: '--cause-refused-entry' },
  { id: 'past', label: 'past the cache', phrase: 'requests that go past the cache', color: '--cause-past' },
  { id: 'error', label: 'error', phrase: 'requests that failed', color: '--cause-error' },
];

export const CAUSE_COUNT = CAUSES.length;

/** The place in CAUSES of an outcome. */
export function causeOf(outcome: Pick<Outcome, 'class' | 'reason'>): number {
  return CAUSES.findIndex((cause) => cause.id === idOf(outcome.class, outcome.reason));
}

function idOf(name: string, reason: string): string {
  switch (name) {
    case 'hit':
      return reason === '' ? 'flash' : 'memory';
    case 'partial-miss':
    case 'miss-filled':
      return 'miss';
    case 'miss-not-admitted':
      return 'refused-entry';
    case 'write':
      return reason === 'to-flash' ? 'write-back' : 'write-through';
    case 'flush':
      return 'flush';
    case 'bypass':
      if (reason === 'flush') return 'flush';
      // Its export wants nothing to be kept.
      return reason === 'no-promote' ? 'refused-entry' : 'past';
    case 'cache-off':
      return 'past';
    case 'flash-error':
      // The backing served it: only what was lost failed for the guest.
      return reason === 'dirty-lost' ? 'error' : 'miss';
    case 'backing-error':
    case 'refused':
      return 'error';
    default:
      // A daemon that is newer than the page has outcomes of which this one knows nothing.
      return 'past';
  }
}
