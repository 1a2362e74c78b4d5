// The cluster, where the daemon is in one: its hosts, whose the disks are, what moves, and what had better move.

import { ask } from './api';
import { confirm } from './confirm';
import { Parts, h, mark, say } from './dom';
import { NOTHING, bytes, count, percent } from './format';
import { Poll } from './poll';
import type { AdvisedHost, AdvisedMove, ClusterAdvice, ClusterDisk, ClusterHost, ClusterMove, ClusterView, Snapshot } from './types';

/** Who is there and what moves; and what all have learnt, which hosts tell every twelve seconds. */
const LOOK_MS = 3000;
const ADVICE_MS = 10_000;

/** Disks that are shown; the command shows all. */
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
        card('cluster-hosts', 'Hosts', table(hosts, heading('Host'), heading('Disks', 'number'), heading('Requests/s', 'number'), heading('Flash'), heading('To spare', 'number'), heading('Hits', 'number'), heading('after moves', 'number'))),
        card('cluster-moves', 'Moves', moves, this.#noMoves),
        card('cluster-advice', 'Where disks had better be', this.#sum, this.#adviceTable, this.#caveats),
        card('cluster-disks', 'Disks, and whose they are', table(disks, heading('Disk'), heading('State'), heading('Host'), heading('Generation', 'number'), heading('Dirty data there')), this.#noDisks),
      ),
    );
    this.#follow<ClusterHost[]>('/v1/cluster/hosts', LOOK_MS, (answer) => (this.#hostsNow = answer));
    this.#follow<ClusterDisk[]>('/v1/cluster/disks', LOOK_MS, (answer) => (this.#disksNow = answer));
    this.#follow<ClusterMove[]>('/v1/cluster/moves', LOOK_MS, (answer) => (this.#movesNow = answer));
    this.#follow<ClusterAdvice>('/v1/cluster/advice', ADVICE_MS, (answer) => (this.#advice = answer));
  }

  /** Asks again and again, once the daemon has said that it is in a cluster. */
  #follow<T>(path: string, everyMs: number, take: (answer: T) => void): void {
    const found = (answer: T): void => {
      take(answer);
      say(this.#trouble, '');
      this.#show();
    };
    const poll = new Poll<T>(everyMs, found, (why) => say(this.#trouble, `${why}; what is shown is what was known last.`));
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
    say(this.#noDisks, more > 0 ? `… and ${count(more)} more: hob cluster disks` : this.#disksNow.length ? '' : 'No host has or had a disk yet.');
    this.#moves.show(this.#movesNow);
    say(this.#noMoves, this.#movesNow.length ? '' : 'Nothing is on its way. hob cluster move DISK --to HOST moves a disk, hob cluster evacuate HOST all of a host.');
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
        'Without a machine that uses it, the disk is drained, closed and opened there with an empty cache; clients that come here are refused from then on.',
        'With one, its cache is copied, and it waits until the machine is migrated.',
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
  const lease = view.state === 'member' ? `its lease is good for ${(view.left_ms / 1000).toFixed(0)} s more if nothing is heard of etcd` : undefined;
  const state = {
    member: `${view.host} is a member and holds ${count(view.disks_held)} disks`,
    joining: `${view.host} is not a member yet: disks of the cluster are not served here`,
    suspended: `${view.host} has not heard of etcd for too long: what its disks answer is held`,
  }[view.state];
  return [state, lease, view.why, `etcd at ${view.etcd.join(', ')}`].filter(Boolean).join(' · ');
}

/** How far a move is, in a sentence. */
export function sentence({ disk, from, to, state, note }: ClusterMove): string {
  const way = `${disk} goes from ${from} to ${to}`;
  switch (state) {
    case 'asked':
      return `${disk} is to go to ${to}; the host that has it has not seen that yet`;
    case 'offered':
      return `${way}, which is asked whether it can take it`;
    case 'welcome':
      return `${way}, which can take it`;
    case 'leaving':
      return note ? `${way}: ${note}` : way;
    case 'given':
      return `${disk} was given back by ${from}, and ${to} takes it`;
    case 'done':
      return `${disk} is at ${to}`;
    case 'failed':
      return `${disk} has not gone to ${to}${note ? `: ${note}` : ''}`;
  }
}

/** What the advice comes to. */
export function summary(advice: ClusterAdvice): string {
  if (!(advice.reads > 0)) return 'Nothing is being read, so there is nothing to advise on.';
  const part = (hits: number): string => percent(hits / advice.reads);
  const now = `Of ${count(advice.reads)} reads/s flash serves ${part(advice.hits_now)} with the caches that there are, by the curves`;
  if (advice.moves.length === 0) return `${now}. No move is worth it; dividing each host's flash well would make it ${part(advice.hits_here)}.`;
  return `${now}; ${part(advice.hits_here)} if each host divided its flash well, ${part(advice.hits_then)} after these moves.`;
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
    say(state, isLost ? 'its host vanished' : disk.state);
    mark(state, 'class', isLost ? 'state-bad' : undefined);
    say(host, move ? `${disk.host}, on its way to ${move.to}` : disk.host);
    say(generation, count(disk.generation));
    say(dirty, disk.dirty ? 'perhaps' : 'no');
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
