// Asks for confirmation of a change: shows the new values in rows and the consequences in sentences.

import { Refused } from './api';
import { h } from './dom';

export interface Change {
  /** The change, such as "Change the cache of web". */
  title: string;
  /** The changed values: name, before, after. */
  rows: [string, string, string][];
  /** Consequences of the change. */
  warnings: string[];
  /** Text of the button that makes the change. */
  verb: string;
  /** Makes the change and returns the daemon's notes. */
  apply: () => Promise<string[]>;
}

/** Asks, and makes the change if the user confirms. Returns true if the change was made. */
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
      said.textContent = 'The daemon makes the change …';
      try {
        const notes = await change.apply();
        isDone = true;
        if (notes.length === 0) return dialog.close();
        said.textContent = `Done. ${notes.join('. ')}`;
        buttons.replaceChildren(h('button', { type: 'button', class: 'primary', click: () => dialog.close() }, 'Close'));
        buttons.querySelector('button')?.focus();
      } catch (error) {
        said.textContent = error instanceof Refused ? `Refused: ${error.message}` : 'The daemon did not answer. Check whether the change was made.';
        apply.disabled = false;
        cancel.focus();
      }
    });
    dialog.showModal();
    // Pressing Enter twice must not make a change.
    cancel.focus();
  });
}

function rowsOf(rows: [string, string, string][]): HTMLElement {
  const body = rows.map(([name, before, after]) =>
    h('tr', {}, h('th', { scope: 'row' }, name), h('td', {}, before), h('td', { 'aria-hidden': 'true' }, '→'), h('td', { class: 'new' }, after)),
  );
  return h('table', { class: 'changes' }, h('tbody', {}, ...body));
}
