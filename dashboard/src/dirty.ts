// What only flash has, how it gets to the backing, and when that is done.

import { ask, currentRole, diskPath } from './api';
import { confirm } from './confirm';
import { h, mark, say } from './dom';
import { bytes, duration, mib, percent } from './format';
import type { DiskNow } from './types';

export class DirtyCard {
  readonly root: HTMLElement;
  readonly #used = h('i', {});
  readonly #dirty = h('i', {});
  readonly #text = h('p', { class: 'facts' });
  readonly #drain = h('p', { class: 'facts', id: 'drain-text' });
  readonly #progress = h('progress', { id: 'drain-progress', 'aria-label': 'Progress of the drain' });
  readonly #button = h('button', { type: 'button', id: 'drain', click: () => void this.#ask() }, 'Drain …');
  #now: DiskNow | undefined;
  /** What was dirty when the drain was first seen. */
  #began: { disk: string; bytes: number } | undefined;

  constructor() {
    this.#used.style.background = 'var(--accent)';
    this.#dirty.style.background = 'var(--cause-write-through)';
    this.root = h(
      'article',
      { class: 'card' },
      h('h3', {}, 'What the cache holds'),
      h('div', { class: 'bar tall' }, this.#dirty, this.#used),
      this.#text,
      this.#drain,
      this.#progress,
      h('div', { class: 'row' }, this.#button),
    );
  }

  show(now: DiskNow): void {
    this.#now = now;
    const { figures } = now;
    const cache = now.disk.cache;
    const room = figures?.cache_bytes ?? 0;
    const clean = Math.max(0, (figures?.used_bytes ?? 0) - (figures?.dirty_bytes ?? 0));
    this.#used.style.width = `${room > 0 ? (100 * clean) / room : 0}%`;
    this.#dirty.style.width = `${room > 0 ? (100 * (figures?.dirty_bytes ?? 0)) / room : 0}%`;
    if (!cache) say(this.#text, 'It has no cache: everything goes to the backing.');
    else if (!figures) say(this.#text, 'Nothing is known while it is offline.');
    else say(this.#text, `${bytes(figures.used_bytes)} of ${bytes(room)} hold data (${percent(room > 0 ? figures.used_bytes / room : 0)}); blocks of ${bytes(cache.block_size)}, ${cache.policy}`);
    this.#showDrain(now);
  }

  #showDrain(now: DiskNow): void {
    const dirty = now.disk.cache?.dirty;
    const left = now.figures?.dirty_bytes ?? dirty?.size ?? 0;
    const isDraining = dirty?.draining ?? false;
    this.root.classList.toggle('draining', isDraining);
    mark(this.#button, 'disabled', dirty && currentRole() === 'admin' ? undefined : '');
    say(this.#button, isDraining ? 'Stop the drain …' : 'Drain …');
    if (!isDraining) this.#began = undefined;
    else if (this.#began?.disk !== now.disk.name) this.#began = { disk: now.disk.name, bytes: Math.max(left, 1) };
    mark(this.#progress, 'hidden', isDraining ? undefined : '');
    if (!dirty) {
      say(this.#drain, now.disk.cache ? 'Nothing can be dirty: writes go to the backing before they are answered.' : '');
      return;
    }
    const lost = dirty.lost > 0 ? ` ${bytes(dirty.lost)} of it cannot be read from flash.` : '';
    const rate = dirty.rate > 0 ? `, ${mib(dirty.rate)} MiB/s go to the backing` : '';
    if (isDraining && this.#began) {
      const done = Math.max(0, this.#began.bytes - left);
      this.#progress.max = Math.max(this.#began.bytes, left);
      this.#progress.value = done;
      const eta = dirty.eta_seconds === undefined ? (dirty.why ?? 'nothing moves') : `${duration(dirty.eta_seconds)} left`;
      say(this.#drain, `Draining: ${bytes(left)} left${rate}; ${eta}.${lost}`);
    } else {
      const why = dirty.why ? ` ${dirty.why}.` : '';
      say(this.#drain, left > 0 ? `${bytes(left)} only on flash${rate}.${lost}${why}` : `Everything is on the backing.${why}`);
    }
  }

  async #ask(): Promise<void> {
    const now = this.#now;
    if (!now) return;
    const disk = now.disk.name;
    const isDraining = now.disk.cache?.dirty?.draining ?? false;
    const left = bytes(now.figures?.dirty_bytes ?? 0);
    await confirm({
      title: isDraining ? `Stop the drain of ${disk}` : `Drain ${disk}`,
      rows: [],
      warnings: [
        isDraining
          ? `${left} stay on flash only, and go to the backing as the cache's settings say.`
          : `${left} that only flash has go to the backing, at the price of some of the backing's time. The disk is served meanwhile.`,
      ],
      verb: isDraining ? 'Stop it' : 'Drain',
      apply: async () => (await ask<{ notes: string[] }>(isDraining ? 'DELETE' : 'POST', diskPath(disk, '/drain'))).notes,
    });
  }
}
