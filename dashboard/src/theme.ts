// The theme (light, dark, or that of the system), and the colours of app.css for drawing on a canvas.

import { h, mark, say } from './dom';

const KEY = 'hob-theme';
const THEMES = ['system', 'light', 'dark'] as const;
type Theme = (typeof THEMES)[number];

const listeners: (() => void)[] = [];

/** Calls a function after each change of the colours. */
export function onTheme(changed: () => void): void {
  listeners.push(changed);
}

const cache = new Map<string, string>();
let probe: HTMLElement | undefined;

/** Returns a colour variable of app.css. */
export function color(variable: string): string {
  const known = cache.get(variable);
  if (known) return known;
  if (!probe) {
    probe = h('span', { class: 'probe', 'aria-hidden': 'true' });
    document.body.append(probe);
  }
  probe.style.color = `var(${variable})`;
  const found = getComputedStyle(probe).color;
  cache.set(variable, found);
  return found;
}

function apply(theme: Theme): void {
  mark(document.documentElement, 'data-theme', theme === 'system' ? undefined : theme);
  cache.clear();
  listeners.forEach((changed) => changed());
}

/** The button that switches between the themes. */
export function themeSwitch(): HTMLElement {
  const kept = localStorage.getItem(KEY);
  let theme: Theme = THEMES.find((name) => name === kept) ?? 'system';
  const button = h('button', {
    class: 'quiet',
    type: 'button',
    id: 'theme',
    click: () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? 'system';
      localStorage.setItem(KEY, theme);
      show();
    },
  });
  const show = (): void => {
    say(button, `Theme: ${theme}`);
    apply(theme);
  };
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => apply(theme));
  show();
  return button;
}
