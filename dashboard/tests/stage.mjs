// A daemon with disks that programs which are not ours keep busy, and a browser that looks at it.
//
// The backings lie on one slow array, played by nbdkit with its delay filter; fio is the guests. HOB_BIN names the hob to test.
// The page comes from that hob, or from the directory that DIST names: DIST=dist tests a new page without a build of hob.

import assert from 'node:assert/strict';
import { spawn, execFileSync } from 'node:child_process';
import { closeSync, existsSync, mkdtempSync, openSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { connect, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import { chromium } from 'playwright-core';

const here = dirname(fileURLToPath(import.meta.url));
/** Where pictures of the page go: PICTURES=docs/images renews those of the docs. */
export const pictures = process.env.PICTURES ?? join(tmpdir(), 'hob-dashboard-pictures');

const MIB = 1 << 20;

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Waits until `what` returns something that is true, and returns it. */
export async function until(what, why, ms = 20_000) {
  const end = Date.now() + ms;
  let last;
  while (Date.now() < end) {
    try {
      last = await what();
      if (last) return last;
    } catch (error) {
      last = error;
    }
    await sleep(100);
  }
  throw new Error(`${why}: still not after ${ms} ms (${last})`);
}

/** A port of 127.0.0.1 that nobody has at the moment. */
export function freePort() {
  return new Promise((resolve, reject) => {
    const server = createServer();
    server.on('error', reject);
    server.listen(0, '127.0.0.1', () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
}

function answers(port) {
  return new Promise((resolve) => {
    const socket = connect(port, '127.0.0.1', () => resolve(!socket.destroy().connecting));
    socket.on('error', () => resolve(false));
  });
}

function hobBinary() {
  const named = process.env.HOB_BIN;
  if (named) return named;
  for (const profile of ['release', 'debug']) {
    const path = join(here, '..', '..', 'target', profile, 'hob');
    if (existsSync(path)) return path;
  }
  throw new Error('build hob first, or name it in HOB_BIN');
}

/** A module of the page that needs no browser. */
export async function source(name) {
  const built = await build({
    entryPoints: [join(here, '..', 'src', `${name}.ts`)], bundle: true, format: 'esm', write: false, logLevel: 'warning',
  });
  return import(`data:text/javascript;base64,${Buffer.from(built.outputFiles[0].contents).toString('base64')}`);
}

/** Fails when something went wrong on a page, or it asked for something elsewhere. `expected` says which complaints are meant to be there. */
export function clean(page, expected = /^$/) {
  assert.deepEqual(page.left, [], 'requests that left the origin');
  assert.deepEqual(page.wrong.filter((text) => !expected.test(text)), [], 'complaints of the browser');
}

export class Stage {
  dir = mkdtempSync(join(tmpdir(), 'hob-dashboard-'));
  children = [];
  /** Servers of backings, by their names. */
  arrays = new Map();

  path(name) {
    return join(this.dir, name);
  }

  /** Starts a program that ends with the stage. */
  start(program, args, name = program) {
    // Into a file: nobody empties a pipe while this process waits for another one.
    const log = this.path(`${this.children.length}-${name.replaceAll(' ', '-').replace(/.*\//, '')}.log`);
    const output = openSync(log, 'w');
    const child = spawn(program, args, { stdio: ['ignore', output, output] });
    closeSync(output);
    Object.defineProperty(child, 'said', { get: () => readFileSync(log, 'utf8') });
    child.ended = new Promise((resolve) => child.on('exit', resolve).on('error', resolve));
    this.children.push(child);
    return child;
  }

  /** A server that takes its time: milliseconds for each request. */
  async array(name, mebibytes, readMs, writeMs) {
    const port = await freePort();
    const delays = [`delay-read=${readMs}ms`, `delay-write=${writeMs}ms`];
    const server = this.start('nbdkit', ['-f', '-i', '127.0.0.1', '-p', port, '--filter=delay', 'memory', `${mebibytes}M`, ...delays]);
    this.arrays.set(name, server);
    await until(() => answers(port), `nbdkit for ${name}`);
    return `nbd://127.0.0.1:${port}/${name}`;
  }

  /** hob.toml: control sockets and whatever else. */
  configure(rest, control = '') {
    const config = `state_dir = "${this.path('state')}"\nlisten = ["unix:${this.path('nbd.sock')}"]\nshards = 1\n[control]\n` +
      `listen = ["unix:${this.path('ctl.sock')}"${control ? `, ${control.listen}` : ''}]\n${control?.more ?? ''}\n${rest}`;
    writeFileSync(this.path('hob.toml'), config);
  }

  async daemon() {
    this.hob = this.start(hobBinary(), ['daemon', '--config', this.path('hob.toml')], 'hob daemon');
    await until(() => existsSync(this.path('ctl.sock')) || this.hob.exitCode !== null, 'the daemon');
    if (this.hob.exitCode !== null) throw new Error(`hob daemon ended: ${this.hob.said}`);
    await until(() => this.ctl(['disk', 'list']) !== undefined, 'the daemon answers');
  }

  async stopDaemon() {
    this.hob.kill('SIGTERM');
    await this.hob.ended;
    assert.equal(this.hob.exitCode, 0, this.hob.said);
  }

  /** Runs a command of hob, and returns what it printed. */
  ctl(args) {
    return execFileSync(hobBinary(), [...args, '--control', `unix:${this.path('ctl.sock')}`], { encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'] });
  }

  /** What the API says at a path, as the command line's socket has it. */
  api(path) {
    const text = execFileSync('curl', ['-sS', '--unix-socket', this.path('ctl.sock'), `http://hob${path}`], { encoding: 'utf8' });
    return JSON.parse(text);
  }

  /** `hob dashboard`, and the address that it prints. */
  async dashboard(...args) {
    const child = this.start(hobBinary(), ['dashboard', '-o', 'json', ...args, '--control', `unix:${this.path('ctl.sock')}`]);
    const said = await until(() => /"url": "(.+)"/.exec(child.said), 'the address of the dashboard');
    return { url: said[1], child };
  }

  /** A guest: fio on a disk, so many requests a second. */
  fio(disk, args) {
    const uri = `nbd+unix:///${disk}?socket=${this.path('nbd.sock')}`;
    return this.start('fio', [
      `--name=${disk}`, '--ioengine=nbd', `--uri=${uri}`, '--thread', '--time_based', '--runtime=3600', '--randrepeat=1', ...args,
    ]);
  }

  async end() {
    await this.browser?.close();
    for (const child of this.children.reverse()) {
      child.kill('SIGTERM');
      await Promise.race([child.ended, sleep(4000).then(() => child.kill('SIGKILL'))]);
    }
    rmSync(this.dir, { recursive: true, force: true });
  }

  /** A page in a window of its own, of which everything that goes wrong or leaves is noted. */
  async open(url, options = {}) {
    this.browser ??= await chromium.launch({
      executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
      args: [
        '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
        '--disable-component-update', '--disable-sync', '--disable-dev-shm-usage',
      ],
    });
    const context = await this.browser.newContext({ viewport: { width: 1360, height: 900 }, reducedMotion: 'reduce', ...options });
    const page = await context.newPage();
    page.setDefaultTimeout(8000);
    page.wrong = [];
    page.left = [];
    const origin = url && new URL(url).origin;
    page.on('console', (message) => {
      if (['error', 'warning'].includes(message.type())) page.wrong.push(message.text());
    });
    page.on('pageerror', (error) => page.wrong.push(String(error)));
    await page.addInitScript(() => {
      addEventListener('securitypolicyviolation', (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));
    });
    await context.route('**/*', (route) => {
      const asked = route.request().url();
      if (origin && new URL(asked).origin !== origin) page.left.push(asked);
      const file = process.env.DIST && /\/assets\/(app\.(js|css))$/.exec(asked)?.[1];
      if (file) return route.fulfill({ path: join(process.env.DIST, file) });
      return route.continue();
    });
    if (url) await page.goto(url);
    return page;
  }
}

/** Four disks on one slow array: one that hits, one that writes back, one that misses, one that has no cache; and guests that keep them busy. */
export async function busyStage({ control } = {}) {
  const stage = new Stage();
  try {
    const web = await stage.array('web', 192, 6, 6);
    const db = await stage.array('db', 192, 8, 8);
    const mail = await stage.array('mail', 192, 14, 14);
    const files = await stage.array('files', 64, 3, 3);
    const pool = ['nvme0', 'nvme1'].map((name) => `"${stage.path(name)}"`).join(', ');
    const disk = (name, backing, cache) =>
      `[[disk]]\nname = "${name}"\nbacking = "${backing}"\ndatastore = "array1"\n${cache ? `cache = { pool = "flash", ${cache} }\n` : ''}`;
    stage.configure(
      `[[pool]]\nname = "flash"\nsegment_size = "1M"\nsize = "192M"\ndevices = [${pool}]\n` +
        disk('web', web, 'size = "96M", block_size = "16K"') +
        disk('db', db, 'size = "64M", block_size = "8K", mode = "write-back"') +
        disk('mail', mail, 'size = "16M", block_size = "16K", admission = "always"') +
        disk('files', files, ''),
      control?.(stage),
    );
    await stage.daemon();
    stage.ctl(['datastore', 'set', 'array1', '--throttle', 'auto', '--latency-ms', '30', '--capacity', '4000']);
    stage.ctl(['qos', 'set', 'db', '--shares', 'high', '--reservation', '100']);
    stage.ctl(['qos', 'set', 'files', '--shares', 'low', '--limit', '80']);
    return stage;
  } catch (error) {
    await stage.end();
    throw error;
  }
}

/** Sets the guests to work. */
export function work(stage) {
  const zipf = '--random_distribution=zipf:1.2';
  stage.fio('web', ['--rw=randrw', '--rwmixread=92', '--bs=8k', '--iodepth=4', '--rate_iops=420,36', zipf, `--size=${96 * MIB}`]);
  stage.fio('db', ['--rw=randrw', '--rwmixread=65', '--bs=8k', '--iodepth=4', '--rate_iops=180,97', zipf, `--size=${120 * MIB}`]);
  stage.fio('mail', ['--rw=randread', '--bs=16k', '--iodepth=4', '--rate_iops=150', `--size=${180 * MIB}`]);
  stage.fio('files', ['--rw=randread', '--bs=32k', '--iodepth=4', `--size=${60 * MIB}`]);
}
