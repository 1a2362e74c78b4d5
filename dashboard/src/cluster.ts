// The cluster, if the daemon is in one: hosts, owners of disks, moves, and placement advice.

import { ask } from './api';
import { confirm } from './confirm';
import { Parts, h, mark, say } from './dom';
import { NOTHING, bytes, count, percent } from './format';
import { Poll } from './poll';
import type { AdvisedHost, AdvisedMove, ClusterAdvice, ClusterDisk, ClusterHost, ClusterMove, ClusterView, Snapshot } from './types';

/** Intervals of queries: hosts, disks and moves; and advice, for which hosts report every twelve seconds. */
const LOOK_MS = 3000;
const ADVICE_MS = 10_000;

/** Maximum number of disks shown; the command shows all. */
const DISKS_MAX = 200;

interface Row {
  root: HTMLElement;
}

export class ClusterPart {
  readonly root: HTMLElement;
  readonly #facts = h('p', { class: 'facts' });
  readonly #trouble = h('p', { class: 'note', role: 'alert' });
  readonly #hosts: Parts<ClusterHost, Row & { show: (host: ClusterHost, advised: AdvisedHost | undefined, own: string) => void }>;
  readonly #disks: Parts<ClusterDisk, Row & { show: (disk: ClusterDisk, move: ClusterMove | undefined) => void }>;
  readonly #moves: Parts<ClusterMove, Row & { show: (move: ClusterMove) => void }>;
  readonly #advised: Parts<AdvisedMove, Row & { show: (move: AdvisedMove) => void }>;
  readonly #noMoves = h('p', { class: 'empty' });
  readonly #noDisks = h('p', { class: 'empty' });
  readonly #sum = h('p', { class: 'facts', id: 'advice-sum' });
  readonly #caveats = h('ul', { class: 'sentences facts' });
  readonly #adviceTable: HTMLElement;
  #hostsNow: ClusterHost[] = [];
  #movesNow: ClusterMove[] = [];
  #disksNow: ClusterDisk[] = [];
  #advice: ClusterAdvice | undefined;
  #own = '';
  readonly #polls: { begin: () => void }[] = [];

  constructor() {
    const heading = (label: string, name = ''): HTMLElement => h('th', { scope: 'col', class: name }, label);
    const table = (body: HTMLElement, ...heads: HTMLElement[]): HTMLElement =>
      h('div', { class: 'scroll' }, h('table', { class: 'plain due' }, h('thead', {}, h('tr', {}, ...heads)), body));
    const [hosts, disks, moves, advised] = [h('tbody', {}), h('tbody', {}), h('ul', { class: 'sentences' }), h('tbody', {})];
    this.#hosts = new Parts(hosts, (host) => host.name, (host) => makeHost(host.name), (part, host) =>
      part.show(host, this.#advice?.hosts.find((one) => one.name === host.name), this.#own));
    this.#disks = new Parts(disks, (disk) => disk.name, (disk) => makeDisk(disk.name), (part, disk) =>
      part.show(disk, this.#movesNow.find((move) => move.disk === disk.name && !isOver(move))));
    this.#moves = new Parts(moves, (move) => `${move.disk} ${move.id}`, () => makeMove(), (part, move) => part.show(move));
    this.#advised = new Parts(advised, (move) => move.disk, (move) => this.#makeAdvised(move), (part, move) => part.show(move));
    this.#adviceTable = table(advised, heading('Disk'), heading('From'), heading('To'), heading('Hits now', 'number'), heading('at once', 'number'), heading('divided well', 'number'), heading('Gain, reads/s', 'number'), heading(''));
    const card = (id: string, title: string, ...rest: (HTMLElement | string)[]): HTMLElement =>
      h('article', { class: 'card', id }, h('h3', {}, title), ...rest);
    this.root = h(
      'section',
      { 'aria-labelledby': 'cluster-title', id: 'cluster', hidden: true },
      h('h2', { id: 'cluster-title' }, 'Cluster'),
      this.#facts,
      this.#trouble,
      h(
        'div',
        { class: 'cards wide' },
        card('cluster-hosts', 'Hosts', table(hosts, heading('Host'), heading('Disks', 'number'), heading('Requests/s', 'number'), heading('Flash'), heading('Spare flash', 'number'), heading('Hit ratio', 'number'), heading('after moves', 'number'))),
        card('cluster-moves', 'Moves', moves, this.#noMoves),
        card('cluster-advice', 'Placement advice', this.#sum, this.#adviceTable, this.#caveats),
        card('cluster-disks', 'Disks and their owners', table(disks, heading('Disk'), heading('State'), heading('Host'), heading('Generation', 'number'), heading('Dirty data there')), this.#noDisks),
      ),
    );
    this.#follow<ClusterHost[]>('/v1/cluster/hosts', LOOK_MS, (answer) => (this.#hostsNow = answer));
    this.#follow<ClusterDisk[]>('/v1/cluster/disks', LOOK_MS, (answer) => (this.#disksNow = answer));
    this.#follow<ClusterMove[]>('/v1/cluster/moves', LOOK_MS, (answer) => (this.#movesNow = answer));
    this.#follow<ClusterAdvice>('/v1/cluster/advice', ADVICE_MS, (answer) => (this.#advice = answer));
  }

  /** Queries a path repeatedly, once the daemon reported that it is in a cluster. */
  #follow<T>(path: string, everyMs: number, take: (answer: T) => void): void {
    const found = (answer: T): void => {
      take(answer);
      say(this.#trouble, '');
      this.#show();
    };
    const poll = new Poll<T>(everyMs, found, (why) => say(this.#trouble, `${why}; the page shows the last known values.`));
    this.#polls.push({ begin: () => poll.at(path) });
  }

  show(snapshot: Snapshot): void {
    mark(this.root, 'hidden', snapshot.cluster ? undefined : '');
    if (!snapshot.cluster) return;
    this.#own = snapshot.cluster.host;
    say(this.#facts, describe(snapshot.cluster));
    mark(this.#facts, 'data-severity', snapshot.cluster.state === 'member' ? undefined : 'bad');
    this.#polls.forEach((poll) => poll.begin());
  }

  #show(): void {
    this.#hosts.show(this.#hostsNow);
    this.#disks.show(this.#disksNow.slice(0, DISKS_MAX));
    const more = this.#disksNow.length - DISKS_MAX;
    say(this.#noDisks, more > 0 ? `… and ${count(more)} more: hob cluster disks` : this.#disksNow.length ? '' : 'No host has owned a disk yet.');
    this.#moves.show(this.#movesNow);
    say(this.#noMoves, this.#movesNow.length ? '' : 'No disk is being moved. Move a disk: hob cluster move DISK --to HOST. Move all disks of a host: hob cluster evacuate HOST.');
    const advice = this.#advice;
    if (!advice) return;
    this.#advised.show(advice.moves);
    mark(this.#adviceTable, 'hidden', advice.moves.length ? undefined : '');
    say(this.#sum, summary(advice));
    const sentences = advice.caveats.map((text) => h('li', {}, text));
    if (this.#caveats.textContent !== advice.caveats.join('')) this.#caveats.replaceChildren(...sentences);
  }

  #makeAdvised({ disk }: AdvisedMove): Row & { show: (move: AdvisedMove) => void } {
    const cells = { from: h('td', {}), to: h('td', {}), now: number(), once: number(), then: number(), gain: number() };
    let shown: AdvisedMove | undefined;
    const button = h('button', { type: 'button', click: () => shown && void this.#order(shown) }, 'Move …');
    const root = h('tr', { 'data-disk': disk }, h('th', { scope: 'row' }, disk), cells.from, cells.to, cells.now, cells.once, cells.then, cells.gain, h('td', {}, button));
    const show = (move: AdvisedMove): void => {
      shown = move;
      say(cells.from, move.from);
      say(cells.to, move.to);
      say(cells.now, percent(move.hit_percent / 100));
      say(cells.once, percent(move.hit_percent_at_once / 100));
      say(cells.then, percent(move.hit_percent_then / 100));
      say(cells.gain, count(move.gain));
      const isMoving = this.#movesNow.some((one) => one.disk === move.disk && !isOver(one));
      button.disabled = isMoving;
    };
    return { root, show };
  }

  async #order(move: AdvisedMove): Promise<void> {
    const path = `/v1/cluster/disks/${encodeURIComponent(move.disk)}/move`;
    await confirm({
      title: `Move ${move.disk} to ${move.to}`,
      rows: [['Host', move.from, move.to], ['Reads that flash serves', percent(move.hit_percent / 100), percent(move.hit_percent_then / 100)]],
      warnings: [
        'If no VM uses the disk, hob drains and closes it here, and opens it on the other host with an empty cache. This host then refuses clients of the disk.',
        'If a VM uses the disk, hob copies its cache and waits until you migrate the VM.',
      ],
      verb: 'Move it',
      apply: async () => {
        await ask('POST', path, { to: move.to });
        return [];
      },
    });
  }
}

function number(): HTMLTableCellElement {
  return h('td', { class: 'number' });
}

function isOver(move: ClusterMove): boolean {
  return move.state === 'done' || move.state === 'failed';
}

export function describe(view: ClusterView): string {
  const lease = view.state === 'member' ? `if etcd does not answer, its lease expires in ${(view.left_ms / 1000).toFixed(0)} s` : undefined;
  const state = {
    member: `${view.host} is a member and owns ${count(view.disks_held)} disks`,
    joining: `${view.host} is not a member yet and does not serve disks of the cluster`,
    suspended: `${view.host} has lost its lease because etcd does not answer: replies of its disks wait`,
  }[view.state];
  return [state, lease, view.why, `etcd at ${view.etcd.join(', ')}`].filter(Boolean).join(' · ');
}

/** Returns the progress of a move as a sentence. */
export function sentence({ disk, from, to, state, note }: ClusterMove): string {
  const way = `${disk} is being moved from ${from} to ${to}`;
  switch (state) {
    case 'asked':
      return `${disk} has an order to move to ${to}; its owner has not read the order yet`;
    case 'offered':
      return `${way}; ${from} asks ${to} whether it can serve the disk`;
    case 'welcome':
      return `${way}; ${to} can serve the disk`;
    case 'leaving':
      return note ? `${way}: ${note}` : way;
    case 'given':
      return `${disk} was released by ${from}; ${to} takes it`;
    case 'done':
      return `${disk} was moved to ${to}`;
    case 'failed':
      return `${disk} was not moved to ${to}${note ? `: ${note}` : ''}`;
  }
}

/** Returns the advice as a sentence. */
export function summary(advice: ClusterAdvice): string {
  if (!(advice.reads > 0)) return 'There are no reads, so there is no advice.';
  const part = (hits: number): string => percent(hits / advice.reads);
  const now = `Of ${count(advice.reads)} reads/s flash serves ${part(advice.hits_now)} with the present caches, according to the miss-ratio curves`;
  if (advice.moves.length === 0) return `${now}. No move is worthwhile; with the best division of each host's flash it would be ${part(advice.hits_here)}.`;
  return `${now}; ${part(advice.hits_here)} with the best division of each host's flash, and ${part(advice.hits_then)} after these moves.`;
}

function makeHost(name: string): Row & { show: (host: ClusterHost, advised: AdvisedHost | undefined, own: string) => void } {
  const where = h('small', {});
  const fill = h('i', {});
  fill.style.background = 'var(--accent)';
  const room = h('small', {});
  const cells = { disks: number(), load: number(), spare: number(), hits: number(), then: number() };
  const root = h(
    'tr',
    { 'data-host': name },
    h('th', { scope: 'row' }, name, where),
    cells.disks,
    cells.load,
    h('td', { class: 'pair' }, h('div', { class: 'bar' }, fill), room),
    cells.spare,
    cells.hits,
    cells.then,
  );
  const show = (host: ClusterHost, advised: AdvisedHost | undefined, own: string): void => {
    const [size, free] = host.pools.reduce(([size, free], pool) => [size + pool.size, free + pool.free], [0, 0]);
    say(where, [host.name === own ? 'this host' : host.address, host.version].filter(Boolean).join(' · '));
    say(cells.disks, count(host.disks));
    fill.style.width = `${size > 0 ? (100 * (size - free)) / size : 0}%`;
    say(room, size > 0 ? `${bytes(free)} of ${bytes(size)} free` : 'no pool');
    say(cells.load, advised ? count(advised.load) : NOTHING);
    say(cells.spare, advised ? bytes(advised.to_spare) : NOTHING);
    say(cells.hits, advised ? percent(advised.hit_percent / 100) : NOTHING);
    say(cells.then, advised ? percent(advised.hit_percent_then / 100) : NOTHING);
  };
  return { root, show };
}

function makeDisk(name: string): Row & { show: (disk: ClusterDisk, move: ClusterMove | undefined) => void } {
  const [state, host, generation, dirty] = [h('td', {}), h('td', {}), number(), h('td', {})];
  const root = h('tr', { 'data-disk': name }, h('th', { scope: 'row' }, name), state, host, generation, dirty);
  const show = (disk: ClusterDisk, move: ClusterMove | undefined): void => {
    const isLost = disk.state === 'vanished';
    say(state, isLost ? 'owner vanished' : disk.state);
    mark(state, 'class', isLost ? 'state-bad' : undefined);
    say(host, move ? `${disk.host}, moving to ${move.to}` : disk.host);
    say(generation, count(disk.generation));
    say(dirty, disk.dirty ? 'possible' : 'no');
  };
  return { root, show };
}

function makeMove(): Row & { show: (move: ClusterMove) => void } {
  const root = h('li', {});
  const show = (move: ClusterMove): void => {
    say(root, sentence(move));
    mark(root, 'class', move.state === 'failed' ? 'state-bad' : undefined);
    mark(root, 'data-state', move.state);
  };
  return { root, show };
}
