// Causes: groups of outcomes, each with a colour. docs/outcomes.md lists all outcomes.

import type { Outcome } from './types';

export interface Cause {
  id: string;
  /** In legends. */
  label: string;
  /** The requests of this cause, as part of a sentence. */
  phrase: string;
  /** Colour variable in app.css. */
  color: string;
}

/** Best first. Charts stack them in this order from the bottom. */
export const CAUSES: readonly Cause[] = [
  { id: 'memory', label: 'hit in memory', phrase: 'hits in memory', color: '--cause-memory' },
  { id: 'flash', label: 'hit in flash', phrase: 'hits in flash', color: '--cause-flash' },
  { id: 'write-back', label: 'write to flash', phrase: 'writes to flash', color: '--cause-write-back' },
  { id: 'flush', label: 'flush', phrase: 'flushes', color: '--cause-flush' },
  { id: 'write-through', label: 'write to backing', phrase: 'writes to the backing', color: '--cause-write-through' },
  { id: 'miss', label: 'miss, filled', phrase: 'misses, read from the backing', color: '--cause-miss' },
  { id: 'refused-entry', label: 'miss, not admitted', phrase: 'misses that are not admitted to flash', color: '--cause-refused-entry' },
  { id: 'past', label: 'bypass', phrase: 'requests that bypass the cache', color: '--cause-past' },
  { id: 'error', label: 'error', phrase: 'requests that failed', color: '--cause-error' },
];

export const CAUSE_COUNT = CAUSES.length;

/** Returns the index in CAUSES of an outcome. */
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
      // Reads through an export with no_promote are not filled.
      return reason === 'no-promote' ? 'refused-entry' : 'past';
    case 'cache-off':
      return 'past';
    case 'flash-error':
      // The backing served the request, except if dirty data was lost.
      return reason === 'dirty-lost' ? 'error' : 'miss';
    case 'backing-error':
    case 'refused':
      return 'error';
    default:
      // A newer daemon can have outcomes that this page does not know.
      return 'past';
  }
}
