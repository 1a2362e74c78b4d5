// The page: receives a snapshot each second and updates all parts.

import 'uplot/dist/uPlot.min.css';
import './app.css';
import { currentRole, setToken, takeTokenFromAddress } from './api';
import { ClusterPart } from './cluster';
import { Datastores } from './datastores';
import { Detail } from './detail';
import { Disks } from './disks';
import { h, mark, say } from './dom';
import { follow, type Link } from './events';
import { Histories } from './history';
import { Overview } from './overview';
import { Pools } from './pools';
import { Tasks } from './tasks';
import { themeSwitch } from './theme';
import type { Snapshot } from './types';

class Page {
  readonly #histories = new Histories();
  readonly #link = h('span', { class: 'link-state', id: 'link', role: 'status' }, 'connecting …');
  readonly #role = h('span', { class: 'role', id: 'role' });
  readonly #who = h('span', { class: 'who', id: 'who' });
  readonly #overview = new Overview((disk) => this.#select(disk));
  readonly #disks = new Disks((disk) => this.#select(disk));
  readonly #detail = new Detail();
  readonly #stores = new Datastores();
  readonly #pools = new Pools();
  readonly #tasks = new Tasks();
  readonly #cluster = new ClusterPart();
  readonly #main: HTMLElement;
  readonly #lock: { root: HTMLElement; why: HTMLElement; input: HTMLInputElement };
  #snapshot: Snapshot | undefined;
  #selected: string | undefined = named(location.hash);

  constructor() {
    this.#lock = this.#makeLock();
    this.#main = h(
      'main',
      { id: 'main', hidden: true },
      this.#overview.root,
      this.#tasks.root,
      this.#disks.root,
      this.#detail.root,
      this.#stores.root,
      this.#pools.root,
      this.#cluster.root,
    );
    document.body.replaceChildren(
      h('a', { class: 'skip', href: '#main' }, 'Skip to the content'),
      h('header', {}, h('h1', {}, 'hob'), this.#who, h('span', { class: 'space' }), this.#role, this.#link, themeSwitch()),
      this.#lock.root,
      this.#main,
    );
    addEventListener('hashchange', () => {
      const disk = named(location.hash);
      if (disk !== undefined && disk !== this.#selected) this.#select(disk);
    });
    this.#wake = follow({ snapshot: (snapshot) => this.#take(snapshot), link: (link) => this.#say(link) });
  }

  #wake: () => void;

  #take(snapshot: Snapshot): void {
    this.#snapshot = snapshot;
    this.#histories.take(snapshot);
    mark(this.#main, 'hidden', undefined);
    say(this.#who, `${snapshot.version.version} on ${location.hostname}`);
    const mayOnlyRead = currentRole() === 'read-only';
    say(this.#role, mayOnlyRead ? 'read-only' : '');
    this.#show();
  }

  #show(): void {
    const snapshot = this.#snapshot;
    if (!snapshot) return;
    this.#overview.show(snapshot, this.#histories);
    this.#tasks.show(snapshot);
    // Until the user selects a disk, the page shows the first disk with requests.
    if (this.#selected === undefined) this.#selected = this.#slowest(snapshot);
    const selected = snapshot.disks.find((now) => now.disk.name === this.#selected);
    this.#disks.show(snapshot, this.#histories, selected?.disk.name);
    this.#detail.show(selected, snapshot, this.#histories);
    this.#stores.show(snapshot, this.#histories);
    this.#pools.show(snapshot, this.#histories);
    this.#cluster.show(snapshot);
    const problems = snapshot.health.problems.length;
    document.title = problems > 0 ? `(${problems}) hob` : 'hob';
  }

  #slowest(snapshot: Snapshot): string | undefined {
    const mean = (name: string): number | undefined => this.#histories.of(name).recent?.meanNs;
    const busy = snapshot.disks.map((now) => now.disk.name).filter((name) => mean(name) !== undefined);
    const isKnown = snapshot.disks.some((now) => this.#histories.of(now.disk.name).recent);
    if (busy.length === 0) return isKnown ? snapshot.disks[0]?.disk.name : undefined;
    return busy.reduce((slowest, name) => (mean(name)! > mean(slowest)! ? name : slowest));
  }

  #select(disk: string): void {
    this.#selected = disk;
    history.replaceState(null, '', `#disk=${encodeURIComponent(disk)}`);
    this.#show();
    this.#detail.reveal();
  }

  #say(link: Link): void {
    mark(this.#link, 'data-state', link.state);
    document.body.classList.toggle('stale', link.state !== 'live');
    mark(this.#lock.root, 'hidden', link.state === 'locked' ? undefined : '');
    switch (link.state) {
      case 'connecting':
        return say(this.#link, 'connecting …');
      case 'live':
        return say(this.#link, 'live');
      case 'lost':
        return say(this.#link, `${link.why}; trying again`);
      case 'locked':
        say(this.#link, 'a token is required');
        say(this.#lock.why, link.why);
        mark(this.#main, 'hidden', '');
        return this.#lock.input.focus();
    }
  }

  /** The form that asks for a token. */
  #makeLock(): { root: HTMLElement; why: HTMLElement; input: HTMLInputElement } {
    const why = h('p', { class: 'facts', role: 'alert' });
    const input = h('input', { type: 'password', id: 'token', autocomplete: 'off', required: true, size: 34 });
    const form = h(
      'form',
      {
        submit: (event) => {
          event.preventDefault();
          setToken(input.value);
          input.value = '';
          this.#wake();
        },
      },
      h('h2', {}, 'Token required'),
      why,
      h('p', { class: 'facts' }, 'Ask the administrator of the daemon for a token, or run "hob dashboard" on the host, which prints an address with a new token.'),
      h('div', { class: 'field' }, h('label', { for: 'token' }, 'Token'), input, h('small', {}, 'The page keeps the token until this tab is closed, and sends it to this daemon only.')),
      h('div', { class: 'buttons left' }, h('button', { type: 'submit', class: 'primary' }, 'Show the dashboard')),
    );
    return { root: h('section', { class: 'lock', id: 'lock', hidden: true }, form), why, input };
  }
}

/** Returns the disk that the page's address names. */
function named(hash: string): string | undefined {
  const found = /^#disk=(.+)$/.exec(hash)?.[1];
  try {
    return found === undefined ? undefined : decodeURIComponent(found);
  } catch {
    return undefined;
  }
}

takeTokenFromAddress();
new Page();
