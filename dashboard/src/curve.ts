// The miss-ratio curve of a disk, with the present cache size and the measured miss ratio.

import uPlot from 'uplot';
import { diskPath } from './api';
import { axis, fit, powersOfTwo } from './charts';
import { h, say } from './dom';
import { bytes, count, duration, percent } from './format';
import { Poll } from './poll';
import { color, onTheme } from './theme';
import type { BlockCurve, Curve } from './types';

const HEIGHT = 230;

export class CurveCard {
  readonly root: HTMLElement;
  readonly #text = h('p', { class: 'facts', id: 'curve-text' });
  readonly #advice = h('p', { class: 'facts' });
  readonly #plot: uPlot;
  readonly #poll: Poll<Curve>;
  #now: { size: number; misses: number } | undefined;
  #disk = '';

  constructor() {
    const place = h('div', { class: 'plot' });
    this.root = h(
      'article',
      { class: 'card' },
      h('h3', {}, 'Miss ratio by cache size'),
      this.#text,
      h('figure', { class: 'chart', role: 'group', 'aria-label': 'Miss ratio by cache size; the text describes the chart' }, place),
      this.#advice,
    );
    this.#plot = new uPlot(this.#config(), [[0], [null]], place);
    fit(this.#plot, place, HEIGHT);
    onTheme(() => this.#plot.redraw(false));
    this.#poll = new Poll<Curve>(8000, (found) => this.#take(found), (why) => this.#nothing(`No curve: ${why}`));
  }

  show(disk: string): void {
    if (disk !== this.#disk) {
      this.#disk = disk;
      this.#nothing('Asking …');
    }
    this.#poll.at(diskPath(disk, '/curve'));
  }

  #nothing(why: string): void {
    this.#now = undefined;
    say(this.#text, why);
    say(this.#advice, '');
    this.#plot.setData([[0], [null]]);
  }

  #take(found: Curve): void {
    const curve = suitable(found);
    if (!curve || curve.accesses === 0) {
      this.#nothing(`No reads in ${duration(found.elapsed_ns / 1e9)}, so there is no curve.`);
      return;
    }
    const { cache } = found;
    this.#now = cache ? { size: cache.size, misses: 1 - found.hit_percent / 100 } : undefined;
    const top = Math.max(curve.points.at(-1)?.cache_bytes ?? 0, 1.15 * (cache?.size ?? 0));
    // After its last point the curve is horizontal.
    const points = [...curve.points, { cache_bytes: top, miss_ratio: curve.points.at(-1)?.miss_ratio ?? 1 }];
    this.#plot.setData([points.map((point) => point.cache_bytes), points.map((point) => 100 * point.miss_ratio)]);
    say(
      this.#text,
      `${count(found.reads)} reads in ${duration(found.elapsed_ns / 1e9)} accessed ${bytes(curve.footprint_bytes)} of different data; ` +
        `the curve is that of an LRU cache with blocks of ${bytes(curve.block_size)}` +
        (curve.sample_rate < 1 ? `, estimated from a sample of ${percent(curve.sample_rate)} of the blocks.` : '.'),
    );
    const at = (size: number): string => percent(1 - missesAt(curve, size));
    say(
      this.#advice,
      cache
        ? `Of its reads, ${percent(found.hit_percent / 100)} hit. At ${bytes(cache.size)}, its present size, the curve expects ` +
            `${percent(cache.expected_hit_percent / 100)}; at half the size ${at(cache.size / 2)}, at twice the size ${at(cache.size * 2)}.`
        : `The disk has no cache. With a cache of ${bytes(curve.footprint_bytes / 4)}, ${at(curve.footprint_bytes / 4)} of its reads would hit; ` +
            `with ${bytes(curve.footprint_bytes)}, ${at(curve.footprint_bytes)}.`,
    );
  }

  #config(): uPlot.Options {
    return {
      width: 320,
      height: HEIGHT,
      padding: [14, 14, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: (_, __, high) => [0, Math.max(high ?? 0, 1 << 20)] }, y: { range: [0, 100] } },
      axes: [
        axis({ size: 28, space: 80, incrs: powersOfTwo(), values: (_, splits) => splits.map((value) => bytes(value ?? 0)) }),
        axis({ size: 46, space: 36, values: (_, splits) => splits.map((value) => `${value} %`) }),
      ],
      series: [
        {},
        { stroke: () => color('--cause-miss'), fill: () => color('--wash'), width: 2, points: { show: false } },
      ],
      hooks: { draw: [(plot) => this.#mark(plot)] },
    };
  }

  /** Draws the present size, and a point at the measured miss ratio. */
  #mark(plot: uPlot): void {
    const now = this.#now;
    if (!now) return;
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio;
    const x = Math.round(plot.valToPos(now.size, 'x', true));
    const y = plot.valToPos(100 * now.misses, 'y', true);
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color('--ink');
    ctx.lineWidth = 1.5 * scale;
    ctx.setLineDash([5 * scale, 4 * scale]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.arc(x, y, 4.5 * scale, 0, 2 * Math.PI);
    ctx.fill();
    ctx.font = `${11 * scale}px system-ui, sans-serif`;
    const isRight = x > bbox.left + bbox.width / 2;
    ctx.textAlign = isRight ? 'right' : 'left';
    const beside = x + (isRight ? -7 : 7) * scale;
    ctx.fillText(`now: ${bytes(now.size)}`, beside, bbox.top + 10 * scale);
    // If the point is near the top, its label is below it, so that the labels do not overlap.
    const isHigh = y < bbox.top + 30 * scale;
    ctx.fillText(`misses ${percent(now.misses)}`, beside, isHigh ? y + 18 * scale : y - 6 * scale);
    ctx.restore();
  }
}

/** Returns the largest available block size that is not larger than the cache's. */
function suitable(found: Curve): BlockCurve | undefined {
  const size = found.cache?.block_size ?? Infinity;
  const not = found.block_sizes.filter((curve) => curve.block_size <= size);
  return found.cache ? (not.at(-1) ?? found.block_sizes[0]) : found.block_sizes[0];
}

/** Interpolates linearly between points; after the last point the value is constant. */
export function missesAt(curve: BlockCurve, size: number): number {
  const { points } = curve;
  const next = points.findIndex((point) => point.cache_bytes >= size);
  const above = points[next];
  if (!above) return points.at(-1)?.miss_ratio ?? 1;
  const below = points[next - 1];
  if (!below || above.cache_bytes === below.cache_bytes) return above.miss_ratio;
  const share = (size - below.cache_bytes) / (above.cache_bytes - below.cache_bytes);
  return below.miss_ratio + share * (above.miss_ratio - below.miss_ratio);
}
