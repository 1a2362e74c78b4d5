// The figures on the page are those of the API: rates while guests are at work, and every count when they have stopped.

import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { busyStage, clean, sleep, source, until, work } from './stage.mjs';

const DISKS = ['web', 'db', 'mail', 'files'];
const { bytes, count, percent } = await source('format');

let stage;
let page;

before(async () => {
  stage = await busyStage();
  work(stage);
  const { url } = await stage.dashboard();
  page = await stage.open(url);
  await page.locator('#disks tbody tr').nth(3).waitFor();
});

after(() => stage?.end());

const number = (text) => Number(text.replace(/[\u202f\u00a0 ]/g, '').replace(/[^0-9.].*$/, ''));
const cell = async (disk, column) => number((await page.locator(`#disks tr[data-disk="${disk}"] .c-${column}`).first().innerText()).split('\n')[0]);
const load = () => new Map(stage.api('/v1/load').map((row) => [row.disk, { ...row, at: Date.now() }]));

/** What a page says at a place, once it is what it should be. */
async function says(selector, expected, why) {
  let found;
  await until(async () => (found = await page.locator(selector).first().textContent()).includes(expected()), why).catch((error) => {
    throw new Error(`${why}: expected '${expected()}' in '${found}' (${error.message})`);
  });
}

test('rates are those that two looks at the API give', async () => {
  // Until caches have warmed up, rates change.
  await sleep(12_000);
  const before = load();
  await sleep(5000);
  const after = load();
  const near = (shown, expected, what, share = 0.2) =>
    assert.ok(Math.abs(shown - expected) <= Math.max(share * expected, 2), `${what}: ${shown} on the page, ${expected} from the API`);
  for (const disk of DISKS) {
    const [was, is] = [before.get(disk), after.get(disk)];
    const seconds = (is.elapsed_ns - was.elapsed_ns) / 1e9;
    const requests = is.requests - was.requests;
    near(await cell(disk, 'iops'), requests / seconds, `IOPS of ${disk}`);
    near(await cell(disk, 'read'), (is.read_bytes - was.read_bytes) / seconds / 1048576, `MiB/s read of ${disk}`);
    near(await cell(disk, 'write'), (is.write_bytes - was.write_bytes) / seconds / 1048576, `MiB/s written of ${disk}`);
    near(await cell(disk, 'hits'), (100 * (is.read_hits - was.read_hits)) / Math.max(1, is.reads - was.reads), `hits of ${disk}`);
  }
  // The array's delays decide about these two, and nothing about them changes.
  for (const disk of ['mail', 'files']) {
    const [was, is] = [before.get(disk), after.get(disk)];
    const mean = (is.latency_sum_ns - was.latency_sum_ns) / (is.requests - was.requests) / 1e6;
    near(await cell(disk, 'latency'), mean, `latency of ${disk}`);
  }
});

test('the slowest disk and the reason stand at the top', async () => {
  const headline = await page.locator('#headline').innerText();
  assert.match(headline, /^files is slow, .*ms: .*its limit of 80 units\/s throttles it$/);
  assert.match(await page.locator('#disks tr[data-disk=mail] .why').innerText(), /misses, read from the backing/);
  assert.equal(await page.locator('#disks tbody tr').first().getAttribute('data-disk'), 'files');
});

test('what is due stands beside what was received', async () => {
  const row = page.locator('[data-datastore=array1] tr[data-disk=files]');
  const text = await row.innerText();
  assert.match(text, /low \(500\)/);
  assert.match(text, /80 units\/s/);
  assert.match(text, /entitled to .*%, received .*%; its I\/Os wait/);
  assert.match(await page.locator('[data-datastore=array1] tr[data-disk=db]').innerText(), /high \(2000\)/);
  assert.match(await page.locator('[data-datastore=array1] .facts').innerText(), /configured capacity 4.000 units\/s, 100 reserved/);
});

test('a backing that does not answer is seen at once, and that it answers again', async () => {
  const array = stage.arrays.get('mail');
  array.kill('SIGSTOP');
  try {
    // Within 2 s only the waiting requests are known; after that, that they wait for the backing.
    const slow = /^mail: its backing answers slowly: the oldest of \d+ requests has waited [\d.]+ s$/;
    await until(async () => slow.test(await page.locator('#headline').innerText()), 'it is said');
    assert.equal(await page.locator('#disks tr[data-disk=mail]').getAttribute('data-severity'), 'bad');
  } finally {
    array.kill('SIGCONT');
  }
  await until(async () => /misses, read from the backing/.test(await page.locator('#disks tr[data-disk=mail] .why').innerText()), 'it goes on');
});

test('with guests at rest, every count is the same', async () => {
  stage.children.filter((child) => child.spawnfile === 'fio').forEach((child) => child.kill('SIGTERM'));
  await until(() => stage.api('/v1/load').every((row) => row.in_flight === 0), 'guests are at rest');
  for (const disk of DISKS) {
    await page.locator(`#disks tr[data-disk=${disk}] button`).click();
    const stats = stage.api(`/v1/disks/${disk}/stats`);
    await says('#detail-name', () => disk, 'the disk that was chosen');
    await says('#totals', () => `${count(stats.requests)} requests in`, `requests of ${disk}`);
    await says('#totals', () => `${count(stats.reads)} reads (${bytes(stats.read_bytes)}), ${count(stats.writes)} writes (${bytes(stats.write_bytes)}); 0 in flight`, `reads and writes of ${disk}`);
    const explained = stage.api(`/v1/disks/${disk}/explain`).sentences;
    await says('.sentences', () => explained[0].slice(0, 30), `why, of ${disk}`);
    await histograms(disk);
    const curve = stage.api(`/v1/disks/${disk}/curve`);
    await says('#curve-text', () => `${count(curve.reads)} reads in `, `reads of the curve of ${disk}`);
    if (!curve.cache) continue;
    await says('#curve-text + figure + p', () => `Of its reads, ${percent(curve.hit_percent / 100)} hit. At ${bytes(curve.cache.size)},`, `hits of ${disk}`);
    await says('#curve-text + figure + p', () => `expects ${percent(curve.cache.expected_hit_percent / 100)};`, `what the curve of ${disk} expects`);
  }
});

/** Every bucket of all 18. */
async function histograms(disk) {
  await page.locator('summary', { hasText: 'As numbers' }).evaluate((summary) => (summary.parentElement.open = true));
  const { histograms } = stage.api(`/v1/disks/${disk}/histograms`);
  assert.equal(histograms.length, 18);
  for (const one of histograms) {
    await page.selectOption('#histogram-metric', one.metric);
    await page.selectOption('#histogram-class', one.class);
    const expected = one.buckets.map((bucket) => count(bucket.count));
    const shown = () => page.locator('#histogram-numbers tbody td:nth-child(2)').allInnerTexts();
    await until(async () => assert.deepEqual(await shown(), expected) === undefined, `${one.metric} of ${one.class} of ${disk}`);
  }
}

test('room and dirty data are those of the API', async () => {
  await page.locator('#disks tr[data-disk=db] button').click();
  const pool = () => stage.api('/v1/pools/flash');
  await says('[data-pool=flash] .facts', () => `${bytes(pool().size - pool().free)} of ${bytes(pool().size)} allocated to caches of 3 disks, ${bytes(pool().free)} free`, 'room of the pool');
  await says('#tile-dirty', () => bytes(stage.api('/v1/disks/db/stats').dirty_bytes), 'dirty data');
  const db = () => stage.api('/v1/load').find((row) => row.disk === 'db');
  await until(async () => (await page.locator('#detail').innerText()).includes(`${bytes(db().used_bytes)} of ${bytes(db().cache_bytes)} have data`), 'what the cache holds');
});

test('nothing went wrong on the page, and nothing left it', () => clean(page));
