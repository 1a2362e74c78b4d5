// Forms for a disk's cache and for its shares and limits. The page shows the changed values, and sends only these after the
// user confirms.

import { ask, currentRole, diskPath } from './api';
import { confirm, type Change } from './confirm';
import { h, mark, say } from './dom';
import { NOTHING, bytes, exactBytes } from './format';
import type { Cache, DiskNow, DiskQos, PoolNow, Snapshot } from './types';

/** Fields of a request. */
type Body = Record<string, string | boolean>;

interface Field {
  /** Name in the API. */
  id: string;
  label: string;
  hint?: string;
  input: HTMLInputElement | HTMLSelectElement;
  /** Present value, as a user would type it. */
  now: string;
}

const MODES = ['write-through', 'write-back', 'write-around', 'read-only-cache', 'pass-through'];

const READ_ONLY = 'You cannot change settings: your token or certificate has the role read-only.';

/** A card with fields. The fields follow the daemon's values until the user changes one of them. */
class Form {
  readonly root: HTMLElement;
  readonly fields: Field[] = [];
  readonly #set = h('fieldset', {});
  readonly #note = h('p', { class: 'facts note' });
  readonly #review: HTMLButtonElement;
  readonly #undo: HTMLButtonElement;
  #disk = '';
  /** True if the present values can be sent, because the daemon does not have them yet. */
  #isNew = false;

  constructor(
    private readonly id: string,
    title: string,
    private readonly change: () => Change | undefined,
  ) {
    this.#review = h('button', { type: 'submit', class: 'primary' }, 'Review …');
    this.#undo = h('button', { type: 'button', click: () => this.undo() }, 'Undo');
    const form = h('form', { id, submit: (event) => {
      event.preventDefault();
      void this.#ask();
    } });
    form.append(this.#set, this.#note, h('div', { class: 'buttons left' }, this.#review, this.#undo));
    form.addEventListener('input', () => this.#mark());
    this.root = h('article', { class: 'card' }, h('h3', {}, title), form);
  }

  add(id: string, label: string, input: HTMLInputElement | HTMLSelectElement, hint?: string): Field {
    const name = `${this.id}-${id}`;
    input.id = name;
    const field: Field = { id, label, input, now: '' };
    if (hint) {
      input.setAttribute('aria-describedby', `${name}-hint`);
      field.hint = hint;
    }
    this.fields.push(field);
    this.#set.append(h('div', { class: 'field' }, h('label', { for: name }, label), input, hint !== undefined && h('small', { id: `${name}-hint` }, hint)));
    return field;
  }

  /** Shows the present values, except in fields that the user is changing. */
  show(disk: string, values: Record<string, string>, closed: string, note = '', isNew = false): void {
    this.#isNew = isNew;
    if (disk !== this.#disk) {
      this.#disk = disk;
      this.fields.forEach((field) => (field.input.value = field.now = values[field.id] ?? ''));
    }
    for (const field of this.fields) {
      const isTouched = field.input.value !== field.now;
      const value = values[field.id] ?? '';
      if (!isTouched && field.now !== value) field.input.value = value;
      field.now = value;
    }
    const refusal = currentRole() === 'read-only' ? READ_ONLY : closed;
    mark(this.#set, 'disabled', refusal ? '' : undefined);
    say(this.#note, refusal || note);
    this.#mark();
  }

  changed(): Field[] {
    return this.fields.filter((field) => field.input.value.trim() !== field.now && !field.input.disabled);
  }

  undo(): void {
    this.fields.forEach((field) => (field.input.value = field.now));
    this.#mark();
  }

  #mark(): void {
    const isClosed = this.#set.disabled;
    this.fields.forEach((field) => mark(field.input, 'data-changed', field.input.value !== field.now ? '' : undefined));
    const isChanged = this.changed().length > 0;
    this.#review.disabled = isClosed || !(isChanged || this.#isNew);
    this.#undo.disabled = isClosed || !isChanged;
  }

  async #ask(): Promise<void> {
    const change = this.change();
    if (!change) return;
    // The sent values are the present values until the next event.
    if (await confirm(change)) this.fields.forEach((field) => (field.now = field.input.value));
    this.#mark();
  }
}

/** The size of a cache that has none of its own. */
const SHARED = 'shared';

const rowsOf = (fields: Field[]): [string, string, string][] =>
  fields.map((field) => {
    const nothing = field.id === 'size' ? SHARED : NOTHING;
    return [field.label, field.now || nothing, field.input.value.trim() || nothing];
  });

/** The form for the cache of a disk. */
export class CacheForm {
  readonly root: HTMLElement;
  readonly #form: Form;
  readonly #pool: Field;
  readonly #size: Field;
  readonly #mode: Field;
  #now: DiskNow | undefined;
  #pools: PoolNow[] = [];

  constructor() {
    this.#form = new Form('cache', 'Change the cache', () => this.#change());
    this.#pool = this.#form.add('pool', 'Pool', h('select', {}));
    this.#size = this.#form.add('size', 'Size', h('input', { type: 'text', inputmode: 'text', autocomplete: 'off', spellcheck: 'false', size: 10, placeholder: SHARED }), 'such as 8G or 512M');
    this.#mode = this.#form.add('mode', 'Mode', h('select', {}, ...MODES.map((mode) => h('option', { value: mode }, mode))));
    this.#form.add('ram', 'Memory tier', h('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', size: 10 }), '0 for none');
    this.root = this.#form.root;
  }

  show(now: DiskNow, snapshot: Snapshot): void {
    this.#now = now;
    this.#pools = snapshot.pools;
    const names = snapshot.pools.map(({ pool }) => pool.name);
    const select = this.#pool.input as HTMLSelectElement;
    if ([...select.options].map((option) => option.value).join('\n') !== names.join('\n')) {
      select.replaceChildren(...names.map((name) => h('option', { value: name }, name)));
    }
    const cache = now.disk.cache;
    // A cache stays in its pool.
    mark(select, 'disabled', cache ? '' : undefined);
    const values = cache
      ? { pool: cache.pool, size: cache.shared ? '' : exactBytes(cache.size), mode: cache.mode, ram: exactBytes(cache.ram) }
      : { pool: names[0] ?? '', size: '', mode: 'write-through', ram: '0' };
    const isOffline = now.disk.state !== 'online';
    const closed = names.length === 0 ? 'There is no pool for a cache.' : isOffline ? 'The disk is offline.' : '';
    this.#form.show(now.disk.name, values, closed, cache ? '' : 'The disk has no cache. Review and confirm the values above to create one.', !cache);
    const pool = this.#pools.find((entry) => entry.pool.name === select.value)?.pool;
    const hint = this.#size.input.nextElementSibling;
    if (hint && pool) say(hint, `such as 8G, or empty: hob chooses the size; ${cache ? 'additional ' : ''}${bytes(pool.free)} free in ${pool.name}`);
  }

  #change(): Change | undefined {
    const now = this.#now;
    if (!now) return undefined;
    const disk = now.disk.name;
    const cache = now.disk.cache;
    const fields = this.#form.changed();
    const body: Body = Object.fromEntries(fields.map((field) => [field.id, field.input.value.trim()]));
    const size = this.#size.input.value.trim();
    if (cache) {
      if (body['size'] === '') {
        delete body['size'];
        body['shared'] = true;
      }
      return {
        title: `Change the cache of ${disk}`,
        rows: rowsOf(fields),
        warnings: warnings(cache, body),
        verb: 'Change it',
        apply: async () => (await ask<{ notes: string[] }>('PATCH', diskPath(disk, '/cache'), body)).notes,
      };
    }
    const wanted = { ...body, pool: this.#pool.input.value, ...(size && { size }), mode: this.#mode.input.value };
    return {
      title: `Create a ${size ? '' : 'shared '}cache for ${disk}`,
      rows: rowsOf([this.#pool, this.#size, this.#mode]).map(([name, , after]) => [name, NOTHING, after]),
      warnings: ['The cache is empty at first, and is filled as guests read and write.', ...(size ? [] : [CHOSEN])],
      verb: 'Enable it',
      apply: async () => (await ask<{ notes: string[] }>('PUT', diskPath(disk, '/cache'), wanted)).notes,
    };
  }
}

const CHOSEN = 'hob chooses the size, and changes it as the load changes.';

function warnings(cache: Cache, body: Body): string[] {
  const said: string[] = [];
  if (body['mode'] && cache.mode === 'write-back') said.push('hob first writes all dirty data to the backing, which can take long.');
  if (body['mode'] === 'write-back') {
    said.push('Writes are acknowledged when flash has them. Until the backing has them too, they are lost if all copies on flash are lost.');
    if (!cache.persistent) said.push('Write-back needs a persistent cache. The daemon makes the cache persistent, which empties it.');
  }
  if (body['shared']) said.push(CHOSEN);
  if (body['size'] && cache.shared) said.push('hob no longer changes the size.');
  if (body['size']) said.push('The cache keeps the data that fits.');
  if (body['ram']) said.push('The data in the memory tier is dropped; flash keeps its data.');
  return said;
}

/** The form for the shares, limits and reservation of a disk. */
export class QosForm {
  readonly root: HTMLElement;
  readonly #form: Form;
  #now: DiskNow | undefined;

  constructor() {
    this.#form = new Form('qos', 'Change shares and limits', () => this.#change());
    const text = (): HTMLInputElement => h('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', size: 10 });
    const number = (): HTMLInputElement => h('input', { type: 'number', min: 0, step: 1, inputmode: 'numeric' });
    this.#form.add('shares', 'Shares', text(), 'low, normal, high or a number');
    this.#form.add('reservation', 'Reservation', number(), 'units per second; 0 for none');
    this.#form.add('limit', 'Limit', number(), 'units per second; 0 for none');
    this.#form.add('bytes_limit', 'Limit in bytes', text(), 'per second, such as 20M; 0 for none');
    this.#form.add('flash_limit', 'Limit on flash', number(), 'units per second on each device; 0 for none');
    this.root = this.#form.root;
  }

  show(now: DiskNow): void {
    this.#now = now;
    const qos = now.qos;
    const names: Record<number, string> = { 500: 'low', 1000: 'normal', 2000: 'high' };
    const values = qos
      ? {
          shares: names[qos.shares] ?? String(qos.shares),
          reservation: String(qos.reservation),
          limit: String(qos.limit ?? 0),
          bytes_limit: exactBytes(qos.bytes_limit ?? 0),
          flash_limit: String(qos.flash_limit ?? 0),
        }
      : {};
    this.#form.show(now.disk.name, values, qos ? '' : 'The settings are not known yet.');
  }

  #change(): Change | undefined {
    const now = this.#now;
    if (!now) return undefined;
    const disk = now.disk.name;
    const fields = this.#form.changed();
    const numbers = ['reservation', 'limit', 'flash_limit'];
    const value = (field: Field): string | number => (numbers.includes(field.id) ? Number(field.input.value) : field.input.value.trim());
    const body: Record<string, string | number> = Object.fromEntries(fields.map((field) => [field.id, value(field)]));
    const policy = now.qos?.policy;
    // A disk with a storage policy cannot have other settings: it leaves the policy and keeps its values.
    if (policy) body['policy'] = '';
    return {
      title: `Change shares and limits of ${disk}`,
      rows: rowsOf(fields),
      warnings: [
        'The change takes effect immediately, also for waiting I/O.',
        ...(policy ? [`The disk leaves its storage policy ${policy}.`] : []),
      ],
      verb: 'Change it',
      apply: async () => (await ask<DiskQos>('PATCH', diskPath(disk, '/qos'), body)).notes ?? [],
    };
  }
}
