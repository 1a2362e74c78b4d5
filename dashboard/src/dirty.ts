// Dirty data of a disk, and the progress of a drain.

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
  /** Dirty bytes when the page first saw the drain. */
  #began: { disk: string; bytes: number } | undefined;

  constructor() {
    this.#used.style.background = 'var(--accent)';
    this.#dirty.style.background = 'var(--cause-write-through)';
    this.root = h(
      'article',
      { class: 'card' },
      h('h3', {}, 'Data in the cache'),
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
    if (!cache) say(this.#text, 'The disk has no cache: all requests go to the backing.');
    else if (!figures) say(this.#text, 'There are no figures while the disk is offline.');
    else say(this.#text, `${bytes(figures.used_bytes)} of ${bytes(room)} have data (${percent(room > 0 ? figures.used_bytes / room : 0)}); blocks of ${bytes(cache.block_size)}, ${cache.policy}`);
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
      say(this.#drain, now.disk.cache ? 'There is never dirty data: writes are acknowledged when the backing has them.' : '');
      return;
    }
    const lost = dirty.lost > 0 ? ` ${bytes(dirty.lost)} of the dirty data cannot be read from flash.` : '';
    const rate = dirty.rate > 0 ? `, ${mib(dirty.rate)} MiB/s go to the backing` : '';
    if (isDraining && this.#began) {
      const done = Math.max(0, this.#began.bytes - left);
      this.#progress.max = Math.max(this.#began.bytes, left);
      this.#progress.value = done;
      const eta = dirty.eta_seconds === undefined ? (dirty.why ?? 'no progress') : `${duration(dirty.eta_seconds)} left`;
      say(this.#drain, `Draining: ${bytes(left)} left${rate}; ${eta}.${lost}`);
    } else {
      const why = dirty.why ? ` ${dirty.why}.` : '';
      say(this.#drain, left > 0 ? `${bytes(left)} of dirty data${rate}.${lost}${why}` : `No dirty data: the backing has all data.${why}`);
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
          ? `${left} of dirty data stay on flash. hob destages them by the settings of the cache.`
          : `${left} of dirty data are written to the backing, which makes the backing slower meanwhile. Guests can use the disk.`,
      ],
      verb: isDraining ? 'Stop the drain' : 'Drain',
      apply: async () => (await ask<{ notes: string[] }>(isDraining ? 'DELETE' : 'POST', diskPath(disk, '/drain'))).notes,
    });
  }
}
