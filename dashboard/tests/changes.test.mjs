// Changing a disk from the page: nothing before it is confirmed, all of it after, what the daemon refuses is said; by keyboard alone; and
// not at all for who may only look.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { after, before, test } from 'node:test';
import { busyStage, clean, until } from './stage.mjs';

let stage;
let page;

before(async () => {
  stage = await busyStage();
  const { url } = await stage.dashboard();
  page = await stage.open(url);
  await page.locator('#disks tr[data-disk=web] button').click();
});

after(() => stage?.end());

const MIB = 1 << 20;
const disk = (name) => stage.api(`/v1/disks/${name}`);
const qos = (name) => stage.api(`/v1/disks/${name}/qos`);
const review = (form) => page.locator(`#${form} button[type=submit]`).click();
const press = (name) => page.locator('dialog').getByRole('button', { name, exact: true }).click();
/** The dialog ends by itself, or, when the daemon has notes, with Close. */
const closed = () =>
  until(async () => {
    const close = page.locator('dialog').getByRole('button', { name: 'Close', exact: true });
    if (await close.isVisible()) await close.click();
    return (await page.locator('dialog').count()) === 0;
  }, 'the dialog ends');

test('a change is shown first, and made when it is confirmed', async () => {
  assert.ok(await page.locator('#cache button[type=submit]').isDisabled(), 'nothing to review yet');
  await page.fill('#cache-size', '64M');
  await review('cache');
  assert.match(await page.locator('dialog').innerText(), /Change the cache of web[^]*Size\s*96M\s*→\s*64M/);
  assert.equal(disk('web').cache.size, 96 * MIB, 'not yet');
  await press('Cancel');
  await closed();
  assert.equal(disk('web').cache.size, 96 * MIB, 'and not after Cancel');
  await review('cache');
  await page.keyboard.press('Escape');
  await closed();
  assert.equal(disk('web').cache.size, 96 * MIB, 'nor after Escape');
  await review('cache');
  await press('Change it');
  await closed();
  assert.equal(disk('web').cache.size, 64 * MIB);
  assert.equal(disk('web').cache.mode, 'write-through', 'what was not touched stays');
  await until(async () => (await page.locator('#disks tr[data-disk=web] .state').innerText()).includes('64'), 'the table follows');
});

test('a mode that needs more says what it costs', async () => {
  await page.selectOption('#cache-mode', 'write-back');
  await review('cache');
  assert.match(await page.locator('dialog').innerText(), /lost if all copies on flash are/);
  await press('Change it');
  await until(() => disk('web').cache.mode === 'write-back', 'the mode of web');
  await closed();
});

test('shares, limit and reservation arrive, and only what was changed is sent', async () => {
  const sent = [];
  page.on('request', (request) => request.method() !== 'GET' && sent.push([request.method(), new URL(request.url()).pathname, request.postData()]));
  await page.fill('#qos-shares', 'high');
  await page.fill('#qos-limit', '900');
  await page.fill('#qos-reservation', '50');
  await review('qos');
  assert.match(await page.locator('dialog').innerText(), /Shares\s*normal\s*→\s*high/);
  await press('Change it');
  await closed();
  const { shares, limit, reservation } = qos('web');
  assert.deepEqual({ shares, limit, reservation }, { shares: 2000, limit: 900, reservation: 50 });
  assert.deepEqual(sent, [['PATCH', '/v1/disks/web/qos', '{"shares":"high","reservation":50,"limit":900}']]);
  await until(async () => (await page.locator('[data-datastore=array1] tr[data-disk=web]').innerText()).includes('high (2000)'), 'the datastore follows');
});

test('what the daemon refuses is said, and nothing changes', async () => {
  await page.fill('#qos-reservation', '5000');
  await page.fill('#qos-limit', '0');
  await review('qos');
  await press('Change it');
  await until(async () => /Refused: .*5\s?100 units a second/.test(await page.locator('dialog .said').innerText()), 'the numbers of the refusal');
  await press('Cancel');
  await closed();
  assert.equal(qos('web').reservation, 50);
  await page.locator('#qos').getByRole('button', { name: 'Undo' }).click();
  assert.equal(await page.inputValue('#qos-reservation'), '50');
  await page.fill('#cache-size', 'lots');
  await review('cache');
  await press('Change it');
  await until(async () => /Refused: .*'lots' is not a size/.test(await page.locator('dialog .said').innerText()), 'why it is no size');
  await press('Cancel');
  await closed();
  await page.locator('#cache').getByRole('button', { name: 'Undo' }).click();
});

test('a disk without a cache gets one', async () => {
  await page.locator('#disks tr[data-disk=files] button').click();
  await page.fill('#cache-size', '8M');
  await review('cache');
  assert.match(await page.locator('dialog').innerText(), /Create a cache for files/);
  await press('Enable it');
  await until(() => disk('files').cache?.size === 8 * MIB, 'the cache of files');
  await closed();
});

test('a drain is begun, and said to be done', async () => {
  // A backing so slow, and writes so far apart, that it takes seconds.
  stage.ctl(['disk', 'add', 'archive', '--backing', await stage.array('archive', 128, 2, 700)]);
  stage.ctl(['cache', 'enable', 'archive', '--pool', 'flash', '--size', '32M', '--block-size', '16K', '--mode', 'write-back']);
  const uri = `nbd+unix:///archive?socket=${stage.path('nbd.sock')}`;
  const writes = Array.from({ length: 120 }, (_, at) => ['-c', `write -P 7 ${at}M 16k`]);
  execFileSync('qemu-io', ['-f', 'raw', ...writes.flat(), '-c', 'flush', uri], { stdio: 'pipe' });
  const dirty = () => stage.api('/v1/disks/archive/stats').dirty_bytes;
  assert.ok(dirty() > MIB, `${dirty()} dirty`);
  await page.locator('#disks tr[data-disk=archive] button').click();
  await until(async () => /MiB of dirty data/.test(await page.locator('#drain-text').innerText()), 'what is dirty');
  await page.evaluate(() => {
    const text = document.querySelector('#drain-text');
    globalThis.drainTexts = [];
    new MutationObserver(() => drainTexts.push(`${text.textContent} ${document.querySelector('#drain-progress').checkVisibility()}`)).observe(text, { childList: true });
  });
  await page.locator('#drain').click();
  await press('Drain');
  await closed();
  await until(() => dirty() === 0, 'the drain');
  await until(async () => /No dirty data/.test(await page.locator('#drain-text').innerText()), 'the page says so');
  const texts = await page.evaluate(() => drainTexts);
  assert.ok(texts.some((text) => /^Draining: .* left, .* MiB\/s go to the backing; .* s left\. true$/.test(text)), texts.join('\n'));
});

test('everything can be reached and changed by keyboard alone', async () => {
  const { url } = await stage.dashboard();
  const other = await stage.open(url);
  await other.locator('#disks tbody tr').nth(3).waitFor();
  await other.locator('#detail').waitFor();
  const focus = () => other.evaluate(() => {
    const { id, textContent, tagName } = document.activeElement;
    return { id, tag: tagName, text: textContent.slice(0, 60), row: document.activeElement.closest('tr')?.dataset.disk };
  });
  const tabTo = async (is, what) => {
    for (let steps = 0; steps < 80; steps++) {
      await other.keyboard.press('Tab');
      if (is(await focus())) return;
    }
    assert.fail(`no way by Tab to ${what}`);
  };
  await other.keyboard.press('Tab');
  assert.equal((await focus()).text, 'Skip to the content');
  await tabTo((at) => at.id === 'theme', 'the theme');
  await tabTo((at) => at.row !== undefined, 'a disk');
  const order = await other.locator('#disks tbody tr').evaluateAll((rows) => rows.map((row) => row.dataset.disk));
  // Rows keep their places while one of them has the focus.
  const at = order.indexOf((await focus()).row);
  const to = order.indexOf('mail');
  for (let step = at; step !== to; step += Math.sign(to - at)) await other.keyboard.press(to > at ? 'ArrowDown' : 'ArrowUp');
  assert.equal((await focus()).row, 'mail');
  await other.keyboard.press('Enter');
  await until(async () => (await focus()).id === 'detail-name', 'the focus goes to the disk');
  assert.equal((await focus()).text, 'mail');
  await tabTo((at) => at.id === 'histogram-metric', 'the histograms');
  await tabTo((at) => at.id === 'cache-size', 'the size');
  await other.keyboard.press('Control+A');
  await other.keyboard.type('24M');
  await other.keyboard.press('Enter');
  await other.locator('dialog').waitFor();
  assert.equal((await focus()).text, 'Cancel', 'Enter twice changes nothing');
  await other.keyboard.press('Tab');
  assert.equal((await focus()).text, 'Change it');
  await other.keyboard.press('Enter');
  await until(() => disk('mail').cache.size === 24 * MIB, 'the size of mail');
  await other.locator('dialog').waitFor({ state: 'detached' });
  clean(other);
});

test('who may only look is told so, and is refused', async () => {
  const { url } = await stage.dashboard('--read-only');
  const reader = await stage.open(url);
  await reader.locator('#disks tr[data-disk=web] button').click();
  await until(async () => (await reader.locator('#role').innerText()) === 'read-only', 'the role');
  for (const form of ['cache', 'qos']) {
    assert.equal(await reader.locator(`#${form} fieldset:disabled`).count(), 1);
    assert.ok(await reader.locator(`#${form} button[type=submit]`).isDisabled());
    assert.match(await reader.locator(`#${form} .note`).innerText(), /You cannot change settings/);
  }
  assert.ok(await reader.locator('#drain').isDisabled());
  assert.ok(await reader.locator('#histogram-reset').isDisabled());
  const status = await reader.evaluate(async () => {
    const headers = { Authorization: `Bearer ${sessionStorage.getItem('hob-token')}` };
    return (await fetch('/v1/disks/web/cache', { method: 'PATCH', headers, body: '{"size":"8M"}' })).status;
  });
  assert.equal(status, 403);
  assert.equal(disk('web').cache.size, 64 * MIB);
  clean(reader, /status of 403/);
});

test('nothing went wrong on the page, and nothing left it', () => clean(page, /status of (4|5)\d\d/));
