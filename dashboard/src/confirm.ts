// Asking before anything is changed: what will be different, in rows, and what it means, in sentences.

import { Refused } from './api';
import { h } from './dom';

export interface Change {
  /** What is going to be done: "Change the cache of web". */
  title: string;
  /** What is different: name, before, after. */
  rows: [string, string, string][];
  /** What one should know before. */
  warnings: string[];
  /** The word on the button that does it. */
  verb: string;
  /** Does it, and returns what the daemon has to say. */
  apply: () => Promise<string[]>;
}

/** Asks, and does it if the answer is yes. True when it is done. */
export function confirm(change: Change): Promise<boolean> {
  const said = h('p', { class: 'said', role: 'alert' });
  const cancel = h('button', { type: 'button' }, 'Cancel');
  const apply = h('button', { type: 'button', class: 'primary' }, change.verb);
  const buttons = h('div', { class: 'buttons' }, cancel, apply);
  const dialog = h(
    'dialog',
    { 'aria-labelledby': 'confirm-title' },
    h('h2', { id: 'confirm-title' }, change.title),
    change.rows.length > 0 && rowsOf(change.rows),
    ...change.warnings.map((warning) => h('p', { class: 'warning' }, warning)),
    said,
    buttons,
  );
  document.body.append(dialog);
  return new Promise((resolve) => {
    let isDone = false;
    dialog.addEventListener('close', () => {
      dialog.remove();
      resolve(isDone);
    });
    cancel.addEventListener('click', () => dialog.close());
    apply.addEventListener('click', async () => {
      apply.disabled = true;
      said.textContent = 'The daemon is at it …';
      try {
        const notes = await change.apply();
        isDone = true;
        if (notes.length === 0) return dialog.close();
        said.textContent = `Done. ${notes.join('. ')}`;
        buttons.replaceChildren(h('button', { type: 'button', class: 'primary', click: () => dialog.close() }, 'Close'));
        buttons.querySelector('button')?.focus();
      } catch (error) {
        said.textContent = error instanceof Refused ? `Refused: ${error.message}` : 'The daemon did not answer; look whether it was done.';
        apply.disabled = false;
        cancel.focus();
      }
    });
    dialog.showModal();
    // What is hard to take back is not done by whoever presses Enter twice.
    cancel.focus();
  });
}

function rowsOf(rows: [string, string, string][]): HTMLElement {
  const body = rows.map(([name, before, after]) =>
    h('tr', {}, h('th', { scope: 'row' }, name), h('td', {}, before), h('td', { 'aria-hidden': 'true' }, '→'), h('td', { class: 'new' }, after)),
  );
  return h('table', { class: 'changes' }, h('tbody', {}, ...body));
}
