// What needs no browser: rates, reasons, numbers in words, the parser of events.

import assert from 'node:assert/strict';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { after, test } from 'node:test';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { build } from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const dir = mkdtempSync(join(tmpdir(), 'hob-dashboard-units-'));
after(() => rmSync(dir, { recursive: true }));
const names = ['causes', 'curve', 'datastores', 'events', 'format', 'history', 'rates', 'shared', 'why'];
// The parts that draw look at the page as they are loaded.
globalThis.matchMedia = () => ({ addEventListener() {} });
Object.defineProperty(globalThis, 'navigator', { value: { language: 'en' }, configurable: true });
globalThis.window = globalThis;
globalThis.addEventListener = globalThis.dispatchEvent = () => {};
globalThis.document = { addEventListener() {}, documentElement: { classList: { add() {} } } };
globalThis.devicePixelRatio = 1;
await build({
  entryPoints: names.map((name) => join(here, '..', 'src', `${name}.ts`)),
  outdir: dir,
  outExtension: { '.js': '.mjs' },
  bundle: true,
  format: 'esm',
  logLevel: 'warning',
});
const load = (name) => import(pathToFileURL(join(dir, `${name}.mjs`)));
const { CAUSES, causeOf } = await load('causes');
const { between, quantile } = await load('rates');
const { isLate, verdict } = await load('why');
const { Parser } = await load('events');
const { History, Histories, POINTS_MAX } = await load('history');
const { linesOf } = await load('datastores');
const { missesAt } = await load('curve');
const { LAYERS_MAX, layersOf, otherSize, sizeOf } = await load('shared');
const format = await load('format');

const io = (ios = 0, total_ns = 0, waited_ns = 0, units = ios) => ({ ios, errors: 0, units, waited_ns, total_ns, read_bytes: 0, write_bytes: 0 });

const figures = (seconds, more = {}) => ({
  elapsed_ns: seconds * 1e9, reads: 0, writes: 0, read_bytes: 0, write_bytes: 0, read_hits: 0, memory_hits: 0, in_flight: 0, outcomes: [],
  latency: [], flash: io(), backing: io(), cache_bytes: 0, used_bytes: 0, dirty_bytes: 0, destaged_bytes: 0, is_draining: false, ...more,
});

const disk = (more = {}, now = {}) => ({
  disk: { name: 'vm', state: 'online', backing: '/x', size: 1, read_only: false, cache: { state: 'active', mode: 'write-back' }, ...more },
  qos: { disk: 'vm', shares: 1000, reservation: 0, datastore: 'array' },
  figures: figures(1),
  ...now,
});

const outcome = (name, reason, count, ms) => ({ class: name, reason, count, latency_sum_ns: count * ms * 1e6 });

test('every outcome of the docs has a cause', () => {
  const page = readFileSync(join(here, '..', '..', 'docs', 'outcomes.md'), 'utf8');
  const rows = [...page.matchAll(/^\| `([a-z-]+)` \| (?:`([a-z-]+)`)? *\| /gm)];
  assert.ok(rows.length > 20, `${rows.length} rows`);
  const seen = new Set();
  for (const [, name, reason = ''] of rows) {
    const cause = CAUSES[causeOf({ class: name, reason })];
    assert.ok(cause, `${name}/${reason}`);
    if (cause.id === 'past') assert.match(name, /^(bypass|cache-off)$/, `${name}/${reason}`);
    seen.add(cause.id);
  }
  assert.equal(seen.size, CAUSES.length, 'and every cause has an outcome');
  assert.equal(CAUSES[causeOf({ class: 'of tomorrow', reason: 'x' })].id, 'past');
});

test('rates are differences, by cause, and none where counting began anew', () => {
  const before = figures(10, { reads: 100, read_hits: 50, outcomes: [outcome('hit', '', 50, 1)], latency: [[1e6, 50]], backing: io(5, 5e6) });
  const after = figures(12, {
    reads: 120, read_hits: 65, memory_hits: 1, read_bytes: 4096, outcomes: [outcome('hit', '', 66, 1), outcome('miss-filled', '', 4, 10)],
    latency: [[1e6, 66], [1e7, 4]], backing: io(9, 45e6, 8e6, 12),
  });
  const rates = between(before, after);
  assert.equal(rates.iops, 10);
  assert.equal(rates.flashHits, 0.75);
  assert.equal(rates.memoryHits, 0.05);
  assert.equal(rates.readBytes, 2048);
  assert.equal(rates.meanNs, (16e6 + 40e6) / 20);
  assert.equal(rates.p99Ns, 1e7);
  assert.deepEqual([rates.backingIos, rates.backingNs, rates.backingWaitNs, rates.backingUnits], [2, 1e7, 2e6, 3.5]);
  assert.equal(between(after, before), undefined);
  assert.equal(between(undefined, after), undefined);
  assert.equal(between(after, after), undefined);
  assert.equal(quantile([[5, 10]], [[5, 10]], 0.5), undefined);
});

test('a history has gaps where nothing was heard, means over few seconds, and an end', () => {
  const history = new History();
  const take = (at, seconds, requests) =>
    history.take(at, disk({}, { figures: figures(seconds, { outcomes: [outcome('hit', '', requests, 1)] }) }));
  for (let at = 0; at < 20; at++) take(at, at, at * 10);
  assert.equal(history.points.at(-1).rates.iops, 10);
  assert.equal(history.recent.seconds, 5);
  take(60, 60, 600);
  assert.equal(history.points.at(-1).rates, undefined, 'a gap');
  take(61, 1, 5);
  assert.equal(history.points.at(-1).rates, undefined, 'counting began anew');
  take(62, 2, 9);
  assert.equal(history.recent.iops, 4);
  for (let at = 63; at < 63 + POINTS_MAX; at++) take(at, at, at);
  assert.equal(history.points.length, POINTS_MAX);
});

test('the reason is what takes the most time, and what stands behind it', () => {
  const rates = (outcomes, backing = io()) => between(figures(0), figures(1, { outcomes, backing }));
  const said = (outcomes, backing, now = disk(), store = undefined) => verdict(now, rates(outcomes, backing), store);
  const fast = said([outcome('hit', '', 1000, 0.2)]);
  assert.deepEqual([fast.severity, fast.text], ['ok', 'all of its time: hits in flash, 0.20\u00a0ms each']);
  const misses = said([outcome('hit', '', 900, 0.2), outcome('miss-filled', '', 100, 80)], io(100, 79e8));
  assert.equal(misses.severity, 'warn');
  assert.match(misses.text, /^98.% of its time: misses, .* 80.0.ms each$/);
  const limited = disk({}, { qos: { ...disk().qos, limit: 100 } });
  assert.match(said([outcome('miss-filled', '', 100, 80)], io(100, 1e8, 79e8), limited).text, /its limit of 100 units\/s throttles it/);
  assert.match(said([outcome('miss-filled', '', 100, 80)], io(100, 1e8, 79e8)).text, /wait 79.0.ms in the queue for the shared datastore array/);
  assert.match(said([outcome('miss-filled', '', 100, 80)], io(200, 4e9)).text, /an I\/O to the backing takes 20.0.ms$/);
  const flash = (io, qos) => {
    const rates = between(figures(0), figures(1, { outcomes: [outcome('hit', '', 100, 30)], flash: io, backing: { ...io, total_ns: 9e9 } }));
    return verdict(disk({}, { qos: { ...disk().qos, ...qos } }), rates).text;
  };
  assert.match(flash(io(100, 29e8), {}), /hits in flash, 30.0.ms each; flash takes 29.0.ms$/);
  assert.match(flash(io(100, 1e7, 29e8), { flash_limit: 100 }), /; its flash limit is 100 units\/s$/);
  const late = { name: 'array', control: 'auto', latency_ms: 30, latency_ns: 45e6 };
  assert.match(said([outcome('miss-filled', '', 100, 46)], io(100, 45e8), disk(), late).text, /datastore array is slow \(45.0.ms\)/);
  assert.match(said([outcome('cache-off', '', 10, 1)], io(), disk({ cache: undefined })).text, /it has no cache/);
  assert.equal(said([outcome('backing-error', '', 3, 1)]).severity, 'bad');
  assert.match(verdict(disk({ state: 'offline', reason: 'no such file' }), undefined).text, /^offline: no such file$/);
  const failing = { state: 'failing', since_seconds: 3, failed_last_minute: 7, last_error: 'reads fail with EIO' };
  assert.match(verdict(disk({ backing_state: failing }), rates([])).text, /answers with errors; 7 requests failed in the last minute: reads fail/);
  assert.equal(verdict(disk({ cache: { state: 'stalled' } }), rates([])).severity, 'bad');
  assert.equal(verdict(disk({}, { figures: undefined }), undefined).severity, 'bad');
  assert.equal(verdict(disk(), rates([])).severity, 'idle');
  const stuck = disk({}, { figures: figures(1, { in_flight: 7 }) });
  assert.deepEqual(verdict(stuck, rates([])), { severity: 'bad', text: '7 requests are in flight, and none is answered' });
});

test('a backing that is not connected or does not answer is the reason, whatever the requests do', () => {
  const last_error = 'Connection refused';
  const states = [
    [{ state: 'slow', oldest_request_ms: 7500, waiting_requests: 3 }, 'its backing answers slowly: the oldest of 3 requests has waited 7.5 s'],
    [
      { state: 'failing', since_seconds: 3, failed_last_minute: 7, last_error },
      'its backing answers with errors; 7 requests failed in the last minute: Connection refused',
    ],
    [
      { state: 'reconnecting', since_seconds: 12, waiting_requests: 4, last_error },
      'its backing is reconnecting for 12 s: Connection refused; 4 requests wait',
    ],
    [{ state: 'failed', since_seconds: 5, last_error }, 'its backing failed 5 s ago: Connection refused'],
  ];
  const busy = between(figures(0), figures(1, { outcomes: [outcome('hit', '', 1000, 0.2)] }));
  for (const [backing_state, text] of states) {
    for (const rates of [undefined, busy]) {
      assert.deepEqual(verdict(disk({ backing_state }), rates, undefined), { severity: 'bad', text });
    }
    const offline = verdict(disk({ backing_state, state: 'offline', reason: 'no such file' }), busy, undefined);
    assert.equal(offline.text, 'offline: no such file');
  }
  for (const backing_state of [undefined, { state: 'connected' }]) {
    assert.equal(verdict(disk({ backing_state }), busy, undefined).severity, 'ok');
  }
});

test('what is late depends on how a datastore is throttled', () => {
  const store = { name: 'array', latency_ms: 30, latency_ns: 20e6 };
  const late = (more) => isLate({ ...store, ...more });
  assert.deepEqual(
    [{ control: 'auto' }, { control: 'auto', latency_ms: 10 }, { control: 'knee' }, { control: 'knee', knee_ns: 15e6 }, { control: 'off', latency_ms: 1 }, { control: 'depth:8', latency_ms: 1 }].map(late),
    [false, true, false, true, false, false],
  );
});

test('due is a part of the shares of those that want something', () => {
  const histories = new Histories();
  const snapshot = (seconds) => ({
    at_ms: seconds * 1000,
    pools: [],
    disks: [['a', 1000, 30], ['b', 3000, 90], ['c', 500, 0]].map(([name, shares, rate]) =>
      disk({ name }, { qos: { disk: name, shares, reservation: 0 }, figures: figures(seconds, { backing: io(rate * seconds) }) })),
  });
  histories.take(snapshot(1));
  histories.take(snapshot(2));
  const lines = linesOf({ disks: ['a', 'b', 'c'] }, snapshot(2), histories);
  assert.deepEqual(lines.map(({ due, got }) => [due, got]), [[0.25, 0.25], [0.75, 0.75], [undefined, undefined]]);
});

test('a curve runs straight between its points and on after the last', () => {
  const curve = { points: [{ cache_bytes: 0, miss_ratio: 1 }, { cache_bytes: 100, miss_ratio: 0.5 }, { cache_bytes: 200, miss_ratio: 0.4 }] };
  assert.deepEqual([0, 50, 100, 150, 1e9].map((size) => missesAt(curve, size)), [1, 0.75, 0.5, 0.45, 0.4]);
});

test('the history of a pool has what its shared caches divide, gaps, and an end', () => {
  const histories = new Histories();
  const take = (at, shared) => histories.take({ at_ms: at * 1000, disks: [], pools: shared === null ? [] : [{ pool: { name: 'flash', shared } }] });
  const shared = { size: 10, caches: [{ disk: 'a', size: 3 }, { disk: 'b', size: 5 }] };
  const { points } = histories.ofPool('flash');
  take(1, undefined);
  take(2, shared);
  take(20, shared);
  take(21, shared);
  const division = { size: 10, used: 8, sizes: new Map([['a', 3], ['b', 5]]) };
  assert.deepEqual(points, [{ at: 1, division: undefined }, { at: 2, division }, { at: 20, division: undefined }, { at: 21, division }]);
  for (let at = 22; at < 22 + POINTS_MAX; at++) take(at, shared);
  assert.equal(points.length, POINTS_MAX);
  take(9999, null);
  assert.equal(histories.ofPool('flash').points.length, 0, 'a pool that is gone');
});

test('disks keep their layers, and those with little flash have one together', () => {
  const point = (sizes) => ({ at: 0, division: { size: 1000, used: Object.values(sizes).reduce((sum, size) => sum + size, 0), sizes: new Map(Object.entries(sizes)) } });
  const named = (layers) => layers.filter((disk) => disk !== undefined);
  const first = layersOf([], [point({ b: 1, a: 2 }), { at: 1, division: undefined }]);
  assert.equal(first.length, LAYERS_MAX);
  assert.deepEqual(named(first), ['a', 'b'], 'by name');
  const second = layersOf(first, [point({ b: 1, A: 9 })]);
  assert.deepEqual(second.slice(0, 3), ['A', 'b', undefined], 'b keeps its layer, and A gets that of a');
  const many = Object.fromEntries(Array.from({ length: LAYERS_MAX + 2 }, (_, index) => [`disk${index}`, 10 + index]));
  const third = layersOf([], [point(many)]);
  assert.equal(named(third).length, LAYERS_MAX);
  assert.ok(!third.includes('disk0') && !third.includes('disk1'));
  assert.equal(otherSize(third, point(many).division), 10 + 11);
  assert.equal(otherSize(first, point({ a: 4, b: 5 }).division), 0);
});

test('the size of a shared cache is said with its target and its limits', () => {
  const MIB = 2 ** 20;
  const size = (shared) => sizeOf({ room: 12 * MIB, shared: shared && { target: 14 * MIB, limits: { min: 0, max: 0, shares: 1000, pin: false }, ...shared } }).replaceAll('\u00a0', ' ');
  assert.equal(size(undefined), '12 MiB');
  assert.equal(size({}), '12 MiB (shared, target 14 MiB)');
  assert.equal(size({ target: 0 }), '12 MiB (shared)', 'no round yet');
  assert.equal(
    size({ limits: { min: MIB, max: 20 * MIB, shares: 2000, pin: true } }),
    '12 MiB (shared, target 14 MiB, at least 1 MiB, at most 20 MiB, 2\u202f000 shares, pinned)',
  );
});

test('events are parsed however they are cut', () => {
  const stream = 'event: snapshot\nid: 1\ndata: {"a":1}\n\n: a comment\n\nevent: other\ndata: x\n\nevent: snapshot\ndata:{"a":\ndata: 2}\n\n';
  for (let size = 1; size < stream.length; size++) {
    const parser = new Parser();
    const found = [];
    for (let at = 0; at < stream.length; at += size) found.push(...parser.take(stream.slice(at, at + size)));
    assert.deepEqual(found, ['{"a":1}', '{"a":\n2}'], `in pieces of ${size}`);
  }
});

test('numbers have three digits, one unit and a dash for nothing', () => {
  const { bytes, count, duration, exactBytes, iops, mib, ms, percent } = format;
  assert.deepEqual([ms(undefined), ms(0), ms(12_345), ms(1.2e6), ms(45.67e6), ms(1234e6), ms(2e14)], ['–', '0', '0.012', '1.20', '45.7', '1234', '> 137 s']);
  assert.deepEqual([iops(0), iops(3.21), iops(9.96), iops(12345.6)], ['0', '3.2', '10', '12\u202f346']);
  assert.deepEqual([mib(0), mib(1048576), mib(123456789)], ['0', '1.00', '118']);
  assert.deepEqual([bytes(0), bytes(1536), bytes(3 * 2 ** 30), bytes(1.2345 * 2 ** 40)], ['0\u00a0B', '1.50\u00a0KiB', '3\u00a0GiB', '1.23\u00a0TiB']);
  assert.deepEqual([percent(undefined), percent(0), percent(0.0004), percent(0.0123), percent(0.5), percent(1)], ['–', '0\u00a0%', '<\u20090.1\u00a0%', '1.2\u00a0%', '50\u00a0%', '100\u00a0%']);
  assert.deepEqual([exactBytes(0), exactBytes(2 ** 33), exactBytes(1536 * 1024), exactBytes(1000)], ['0', '8G', '1536K', '1000']);
  assert.deepEqual([duration(5), duration(60), duration(185), duration(7800), duration(90000)], ['5 s', '1 min', '3 min 5 s', '2 h 10 min', '1 d 1 h']);
  assert.equal(count(NaN), '–');
  assert.deepEqual([12345, 0, -3, -0.2].map(format.signed), ['+12\u202f345', '0', '−3', '0']);
});
