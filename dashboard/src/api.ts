// Requests to the daemon. Over TCP or through `hob dashboard`, requests need a token, which the page keeps until the tab is closed.

import type { Problem, Role } from './types';

const TOKEN = 'hob-token';

/** The daemon refused a request. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    readonly problem: Problem,
  ) {
    super(problem.hint ? `${problem.error}; ${problem.hint}` : problem.error);
  }
}

/** The role that the daemon reported last. */
let role: Role = 'admin';

export function currentRole(): Role {
  return role;
}

export function token(): string {
  return sessionStorage.getItem(TOKEN) ?? '';
}

export function setToken(text: string): void {
  sessionStorage.setItem(TOKEN, text.trim());
}

/** Removes `#token=…` from the address, so that it is neither bookmarked nor shown. */
export function takeTokenFromAddress(): void {
  const found = /^#token=([^&]+)/.exec(location.hash);
  if (!found?.[1]) return;
  setToken(decodeURIComponent(found[1]));
  history.replaceState(null, '', location.pathname);
}

/** Sends a request and returns a successful response, whose body has not been read. */
export async function call(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = {};
  if (token()) headers['Authorization'] = `Bearer ${token()}`;
  const init: RequestInit = { method, headers, cache: 'no-store', credentials: 'same-origin', redirect: 'error' };
  if (body !== undefined) {
    headers['Content-Type'] = 'application/json';
    init.body = JSON.stringify(body);
  }
  if (signal) init.signal = signal;
  const answer = await fetch(path, init);
  const said = answer.headers.get('x-hob-role');
  if (answer.ok) {
    role = said === 'read-only' ? 'read-only' : 'admin';
    return answer;
  }
  const text = await answer.text();
  let problem: Problem = { error: `the daemon answered ${answer.status}` };
  try {
    problem = JSON.parse(text) as Problem;
  } catch {
    // A proxy answered instead of the daemon.
  }
  throw new Refused(answer.status, problem);
}

export async function ask<T>(method: string, path: string, body?: unknown): Promise<T> {
  return (await (await call(method, path, body)).json()) as T;
}

export function diskPath(disk: string, rest = ''): string {
  return `/v1/disks/${encodeURIComponent(disk)}${rest}`;
}
