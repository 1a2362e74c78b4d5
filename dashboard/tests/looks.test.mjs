// How the page looks: light, dark, on a phone, and without anything to show. The pictures of the docs are made here.

import assert from 'node:assert/strict';
import { mkdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { Stage, busyStage, clean, pictures, sleep, until, work } from './stage.mjs';

const PICTURE_BYTES_MAX = 300_000;
/** Charts of a minute make good pictures for the docs: HISTORY_SECONDS=48. */
const HISTORY_SECONDS = Number(process.env.HISTORY_SECONDS ?? 12);

let stage;
let url;

before(async () => {
  mkdirSync(pictures, { recursive: true });
  stage = await busyStage();
  work(stage);
  ({ url } = await stage.dashboard());
});

after(() => stage?.end());

async function picture(page, name) {
  const path = join(pictures, `${name}.png`);
  await page.screenshot({ path });
  const { size } = statSync(path);
  assert.ok(size > 5000 && size < PICTURE_BYTES_MAX, `${name}: ${size} bytes`);
}

/** Checks the page, and ends its work, which would take time from the next test. */
async function leave(page) {
  clean(page);
  await page.goto('about:blank');
}

/** The luminance of an element's background. */
const brightness = (page, selector) =>
  page.locator(selector).first().evaluate((element) => {
    const [r, g, b] = getComputedStyle(element).backgroundColor.match(/\d+(\.\d+)?/g).map(Number);
    return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
  });

/** Texts that are hard to read: less contrast with what is behind them than WCAG's AA wants. */
const faint = (page) =>
  page.evaluate(() => {
    const canvas = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d', { willReadFrequently: true });
    const rgba = (color) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      return canvas.getImageData(0, 0, 1, 1).data;
    };
    const light = ([r, g, b]) =>
      [r, g, b].map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = (element) => {
      for (let at = element; at; at = at.parentElement) {
        const color = rgba(getComputedStyle(at).backgroundColor);
        if (color[3] === 255) return color;
      }
      return [255, 255, 255];
    };
    const found = [];
    for (const element of document.querySelectorAll('body *')) {
      const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
      if (!hasText || element.closest(':disabled, [hidden]') || !element.checkVisibility()) continue;
      const [a, b] = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
      const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (contrast < 4.5) found.push(`${element.tagName} '${element.textContent.slice(0, 30)}' ${contrast.toFixed(2)}`);
    }
    return found;
  });

test('light and dark follow the system, and the switch goes before it', async () => {
  const page = await stage.open(url, { colorScheme: 'light', viewport: { width: 1360, height: 1240 } });
  await page.locator('#disks tbody tr').nth(3).waitFor();
  await sleep(1000 * HISTORY_SECONDS);
  await page.locator('#disks tr[data-disk=db] button').click();
  await sleep(1500);
  await page.mouse.move(5, 5);
  await page.evaluate(() => { document.activeElement.blur(); scrollTo(0, 0); });
  await sleep(5500);
  assert.ok((await brightness(page, '.card')) > 0.9);
  assert.deepEqual(await faint(page), [], 'light');
  await picture(page, 'dashboard-light');
  await page.emulateMedia({ colorScheme: 'dark' });
  await until(async () => (await brightness(page, '.card')) < 0.2, 'it is dark');
  assert.deepEqual(await faint(page), [], 'dark');
  await page.locator('#detail .cards').scrollIntoViewIfNeeded();
  await page.evaluate(() => document.querySelector('.charts').scrollIntoView());
  await sleep(1500);
  await picture(page, 'dashboard-dark');
  await page.locator('#theme').click();
  assert.equal(await page.locator('#theme').innerText(), 'Theme: light');
  assert.ok((await brightness(page, '.card')) > 0.9);
  await page.reload();
  await page.locator('.card').first().waitFor();
  assert.ok((await brightness(page, '.card')) > 0.9, 'and is kept');
  await leave(page);
});

test('charts change their colours with the theme', async () => {
  const page = await stage.open(url, { colorScheme: 'light' });
  await page.locator('.chart canvas').first().waitFor();
  await sleep(3000);
  const drawn = () => page.locator('.chart canvas').first().evaluate((canvas) => canvas.toDataURL());
  const light = await drawn();
  await page.emulateMedia({ colorScheme: 'dark' });
  await sleep(300);
  assert.notEqual(await drawn(), light);
  await leave(page);
});

test('a phone needs no scrolling sideways', async () => {
  const page = await stage.open(url, { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true, colorScheme: 'light' });
  await page.locator('#disks tbody tr').nth(3).waitFor();
  await page.locator('#disks tr[data-disk=web] button').tap();
  await sleep(6000);
  const widths = () => page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  const [wide, window] = await widths();
  assert.ok(wide <= window, `${wide} of ${window}`);
  await page.fill('#cache-size', '64M');
  await page.locator('#cache button[type=submit]').tap();
  const box = await page.locator('dialog').boundingBox();
  assert.ok(box.x >= 0 && box.x + box.width <= 390, JSON.stringify(box));
  await page.locator('dialog').getByRole('button', { name: 'Cancel' }).tap();
  await page.evaluate(() => { document.activeElement.blur(); scrollTo(0, 0); });
  await sleep(1200);
  await picture(page, 'dashboard-phone');
  for (const width of [320, 768, 1024]) {
    await page.setViewportSize({ width, height: 844 });
    await sleep(400);
    const [wide, window] = await widths();
    assert.ok(wide <= window, `at ${width}: ${wide} of ${window}`);
  }
  await leave(page);
});

test('figures that change move nothing', async () => {
  const page = await stage.open(url);
  await page.locator('#disks tbody tr').nth(3).waitFor();
  await page.locator('.tiles').hover();
  await sleep(6000);
  const places = () => page.evaluate(() => ['.tiles', '#disks', '#detail', '.charts', '[data-datastore]'].map((selector) => Math.round(document.querySelector(selector).getBoundingClientRect().top + scrollY)));
  const before = await places();
  for (let second = 0; second < 5; second++) {
    await sleep(1000);
    const after = await places();
    after.forEach((top, index) => assert.ok(Math.abs(top - before[index]) <= 20, `place ${index}: ${before[index]} became ${top}`));
  }
  await leave(page);
});

test('a disk that is not served is named at the top', async () => {
  const broken = new Stage();
  try {
    broken.configure(`[[disk]]\nname = "gone"\nbacking = "${broken.path('none.img')}"\n`);
    await broken.daemon();
    const page = await broken.open((await broken.dashboard()).url);
    await until(async () => /^disk offline: gone .*No such file/.test(await page.locator('#problems').innerText()), 'the problem');
    assert.match(await page.locator('#headline').innerText(), /^gone: offline: .*No such file/);
    assert.equal(await page.title(), '(1) hob');
    await page.locator('#disks tr[data-disk=gone] button').click();
    assert.match(await page.locator('#totals').textContent(), /no figures while the disk is offline/);
    assert.equal(await page.locator('#cache fieldset:disabled').count(), 1);
    clean(page, /status of 409/);
  } finally {
    await broken.end();
  }
});

test('a daemon without anything says what to do', async () => {
  const empty = new Stage();
  try {
    empty.configure('');
    await empty.daemon();
    const page = await empty.open((await empty.dashboard()).url);
    await until(async () => /There are no disks yet/.test(await page.locator('#headline').innerText()), 'no disks');
    assert.match(await page.locator('#main').innerText(), /There is no pool\. Create one: hob pool create/);
    assert.ok(!(await page.locator('#detail').isVisible()));
    clean(page);
  } finally {
    await empty.end();
  }
});
