// Changes that run in the background: progress, result, and buttons to cancel or acknowledge them.

import { ask, currentRole } from './api';
import { confirm } from './confirm';
import { Parts, h, mark, say } from './dom';
import { bytes, duration } from './format';
import type { Snapshot, Task } from './types';

interface TaskPart {
  root: HTMLElement;
  show: (task: Task) => void;
}

export class Tasks {
  readonly root: HTMLElement;
  readonly #rows: Parts<Task, TaskPart>;

  constructor() {
    const body = h('tbody', {});
    this.#rows = new Parts(body, (task) => String(task.id), makeRow, (part, task) => part.show(task));
    const heading = (label: string): HTMLElement => h('th', { scope: 'col' }, label);
    const head = h('thead', {}, h('tr', {}, ...['Change', 'State', 'For', 'Progress or result'].map(heading), h('th', {})));
    this.root = h(
      'section',
      { 'aria-labelledby': 'tasks-title', id: 'tasks', hidden: true },
      h('h2', { id: 'tasks-title' }, 'Changes in the background'),
      h('div', { class: 'scroll' }, h('table', { class: 'plain' }, head, body)),
    );
  }

  show(snapshot: Snapshot): void {
    const tasks = snapshot.tasks ?? [];
    mark(this.root, 'hidden', tasks.length > 0 ? undefined : '');
    this.#rows.show(tasks);
  }
}

function makeRow({ id, what, subject }: Task): TaskPart {
  let task: Task | undefined;
  const [state, age, text] = [h('td', {}), h('td', {}), h('td', {})];
  const button = h('button', { type: 'button', click: () => task && void end(task) });
  const root = h('tr', { 'data-task': id }, h('th', { scope: 'row' }, `${what} ${subject}`.trim()), state, age, text, h('td', {}, button));
  const show = (now: Task): void => {
    task = now;
    say(state, now.state);
    mark(root, 'data-state', now.state);
    const ended = now.ended_seconds_ago ?? undefined;
    say(age, ended === undefined ? duration(now.age_seconds) : `${duration(now.age_seconds - ended)}, ended ${duration(ended)} ago`);
    say(text, sentence(now));
    const isRunning = now.state === 'running';
    say(button, isRunning ? 'Cancel …' : 'Acknowledge');
    mark(button, 'hidden', isRunning && !now.can_cancel ? '' : undefined);
    mark(button, 'disabled', currentRole() === 'admin' ? undefined : '');
  };
  return { root, show };
}

function sentence({ state, dirty, error }: Task): string {
  if (error) return error;
  if (state !== 'running' || !dirty) return '';
  const rest = dirty.eta_seconds === undefined ? dirty.why : `${duration(dirty.eta_seconds)} left`;
  return [`${bytes(dirty.size)} to destage`, rest].filter(Boolean).join('; ');
}

async function end(task: Task): Promise<void> {
  const name = `${task.what} ${task.subject}`.trim();
  const isRunning = task.state === 'running';
  await confirm({
    title: isRunning ? `Cancel: ${name}` : `Acknowledge: ${name}`,
    rows: [],
    warnings: [
      isRunning
        ? 'hob stops the drain, and does not make the change that waits for it. Dirty data stays on flash.'
        : 'hob removes the task from this list and from the health problems. Nothing else changes.',
    ],
    verb: isRunning ? 'Cancel it' : 'Acknowledge',
    apply: async () => {
      await ask(isRunning ? 'DELETE' : 'POST', `/v1/tasks/${task.id}${isRunning ? '' : '/acknowledge'}`);
      return [];
    },
  });
}
