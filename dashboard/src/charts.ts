// Charts over time, drawn by uPlot: lines or stacked areas of values since the page was opened. The legend below each chart has the
// present values, or those at the cursor, which all charts share.

import uPlot from 'uplot';
import { h, mark, say } from './dom';
import type { Point } from './history';
import { color, onTheme } from './theme';

/** A line of a chart. `P` is the type of the chart's points. */
export interface Line<P = Point> {
  /** A function if the label changes. */
  label: string | (() => string);
  /** A variable of app.css. */
  color: string;
  value: (point: P) => number | undefined;
  dash?: boolean;
}

export interface TimeChartOptions<P = Point> {
  title: string;
  /** Text after the title. */
  unit: string;
  lines: Line<P>[];
  /** Formats a value for legend and axis, without the unit. */
  format: (value: number) => string;
  isStacked?: boolean;
  isLogarithmic?: boolean;
  /** True if values are bytes: the axis has powers of two, and ends at the highest value. */
  isBytes?: boolean;
  /** True if the legend omits lines that were always zero. */
  isSparse?: boolean;
  /** Fixed maximum of the axis. */
  max?: number;
  /** Smallest maximum of the axis. */
  maxAtLeast?: number;
}

/** Initial length of the time axis in seconds; it grows with the data. */
const SPAN_S_MIN = 60;

const HEIGHT = 170;

/** Colours of axes and grid. */
export function axis(more: uPlot.Axis = {}): uPlot.Axis {
  return {
    stroke: () => color('--ink-3'),
    grid: { stroke: () => color('--line'), width: 1 },
    ticks: { stroke: () => color('--line'), width: 1, size: 4 },
    font: '11px system-ui, sans-serif',
    ...more,
  };
}

/** Adjusts the chart to the width of its element. */
export function fit(chart: uPlot, place: HTMLElement, height: number): void {
  new ResizeObserver(() => {
    const width = Math.floor(place.clientWidth);
    if (width > 0 && width !== chart.width) chart.setSize({ width, height });
  }).observe(place);
}

export class TimeChart<P extends { at: number } = Point> {
  readonly root: HTMLElement;
  readonly #plot: uPlot;
  readonly #options: TimeChartOptions<P>;
  readonly #labels: HTMLElement[] = [];
  readonly #values: HTMLElement[] = [];
  readonly #entries: HTMLElement[] = [];
  readonly #when = h('span', { class: 'when' });
  #points: readonly P[] = [];

  constructor(options: TimeChartOptions<P>) {
    this.#options = options;
    const legend = h('ul', { class: 'legend' });
    for (const line of options.lines) {
      const value = h('b', {}, '–');
      const swatch = h('i', { class: line.dash ? 'swatch dash' : 'swatch' });
      swatch.style.setProperty('--swatch', `var(${line.color})`);
      const label = h('span', {}, labelOf(line));
      const entry = h('li', {}, swatch, label, ' ', value);
      legend.append(entry);
      this.#labels.push(label);
      this.#values.push(value);
      this.#entries.push(entry);
    }
    const place = h('div', { class: 'plot' });
    this.root = h(
      'figure',
      { class: 'chart', role: 'group', 'aria-label': `${options.title}, ${options.unit}` },
      h('figcaption', {}, h('span', { class: 'title' }, options.title), h('span', { class: 'unit' }, options.unit), this.#when),
      place,
      legend,
    );
    this.#plot = new uPlot(this.#config(), this.#data(), place);
    fit(this.#plot, place, HEIGHT);
    onTheme(() => this.#plot.redraw(false));
  }

  show(points: readonly P[]): void {
    this.#points = points;
    // Causes without requests in the period have no entry.
    this.#options.lines.forEach((line, index) => {
      const isThere = !this.#options.isSparse || points.some((point) => (line.value(point) ?? 0) > 0);
      mark(this.#entries[index]!, 'hidden', isThere ? undefined : '');
      say(this.#labels[index]!, labelOf(line));
    });
    this.#plot.setData(this.#data());
    this.#label();
  }

  #config(): uPlot.Options {
    const { isStacked, isLogarithmic, isBytes, format, max, maxAtLeast } = this.#options;
    const top = isBytes ? (high: number): number => high || 1 : niceTop;
    const y: uPlot.Scale = isLogarithmic
      ? { distr: 3, range: (_, low, high) => decades(low, high) }
      : { range: (_, __, high) => [0, max ?? top(Math.max(high ?? 0, maxAtLeast ?? 0))] };
    return {
      width: 320,
      height: HEIGHT,
      padding: [8, 24, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: 'time' }, drag: { x: false, y: false }, points: { show: !isStacked, size: 5 } },
      scales: {
        x: { time: true, range: (_, low, high) => [Math.min(low ?? 0, (high ?? 0) - SPAN_S_MIN), high ?? SPAN_S_MIN] },
        y,
      },
      axes: [
        axis({ size: 26, space: 70, values: (_, splits) => splits.map(clock) }),
        axis({
          size: isBytes ? 60 : 52,
          space: 32,
          ...(isLogarithmic ? { splits: (_: uPlot, __: number, low: number, high: number) => powersOfTen(low, high) } : {}),
          ...(isBytes ? { incrs: powersOfTwo() } : {}),
          values: (_, splits) => splits.map((value) => (value === null ? '' : format(value))),
        }),
      ],
      series: [{}, ...this.#drawn().map(({ line }) => this.#series(line))],
      hooks: { setCursor: [() => this.#label()] },
    };
  }

  #series(line: Line<P>): uPlot.Series {
    const stroke = (): string => color(line.color);
    const base: uPlot.Series = { stroke, width: this.#options.isStacked ? 1 : 1.6, points: { show: false }, spanGaps: false };
    if (this.#options.isStacked) return { ...base, fill: stroke };
    return line.dash ? { ...base, dash: [4, 3] } : base;
  }

  /** Returns the lines in drawing order. A stack draws the total first, and then the smaller sums over it. */
  #drawn(): { line: Line<P>; index: number }[] {
    const all = this.#options.lines.map((line, index) => ({ line, index }));
    return this.#options.isStacked ? all.reverse() : all;
  }

  #data(): uPlot.AlignedData {
    const { lines, isStacked } = this.#options;
    const at = this.#points.map((point) => point.at);
    const rows = lines.map((line) => this.#points.map((point) => line.value(point) ?? null));
    if (isStacked) {
      for (let row = 1; row < rows.length; row++) {
        rows[row] = rows[row]!.map((value, point) => (value === null ? null : value + (rows[row - 1]![point] ?? 0)));
      }
    }
    const drawn = this.#drawn().map(({ index }) => rows[index]!);
    return [at, ...drawn];
  }

  #label(): void {
    const at = this.#plot?.cursor?.idx;
    const isLooking = typeof at === 'number' && (this.#plot.cursor.left ?? -1) >= 0;
    const point = isLooking ? this.#points[at] : this.#points.at(-1);
    say(this.#when, isLooking && point ? `at ${clock(point.at)}` : '');
    this.#options.lines.forEach((line, index) => {
      const value = point && line.value(point);
      say(this.#values[index]!, value === undefined ? '–' : this.#options.format(value));
    });
  }
}

function labelOf(line: Line<never>): string {
  return typeof line.label === 'string' ? line.label : line.label();
}

function clock(at: number | null): string {
  return at === null ? '' : new Date(at * 1000).toLocaleTimeString([], { hour12: false });
}

/** Returns the next round number above a value. */
export function niceTop(value: number): number {
  if (value <= 0) return 1;
  const decade = 10 ** Math.floor(Math.log10(value));
  const step = [1, 1.5, 2, 3, 4, 5, 7.5, 10].find((step) => step * decade >= value * 1.02) ?? 10;
  return step * decade;
}

function decades(low: number | null, high: number | null): [number, number] {
  // Latencies from half a microsecond to ten seconds.
  const from = 10 ** Math.floor(Math.log10(Math.max(low ?? 0.1, 1e-4)));
  const to = 10 ** Math.ceil(Math.log10(Math.max(high ?? 10, 1e-3)));
  return [from, Math.max(to, from * 100)];
}

function powersOfTen(low: number, high: number): number[] {
  const [from, to] = [Math.round(Math.log10(low)), Math.round(Math.log10(high))];
  return Array.from({ length: Math.max(0, to - from) + 1 }, (_, index) => 10 ** (from + index));
}

/** Steps of an axis in bytes. */
export function powersOfTwo(): number[] {
  return Array.from({ length: 40 }, (_, index) => 2 ** (12 + index));
}

/** A small chart of the last values of a rate. */
export class Spark {
  readonly root: SVGSVGElement;
  readonly #line: SVGPolylineElement;

  constructor() {
    this.root = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    this.root.setAttribute('class', 'spark');
    this.root.setAttribute('viewBox', '0 0 60 16');
    this.root.setAttribute('preserveAspectRatio', 'none');
    this.root.setAttribute('aria-hidden', 'true');
    this.#line = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');
    this.root.append(this.#line);
  }

  show(values: readonly (number | undefined)[]): void {
    const last = values.slice(-60);
    const top = Math.max(1e-9, ...last.map((value) => value ?? 0));
    const first = 60 - last.length;
    const known = last.map((value, index): [number | undefined, number] => [value, index]).filter(([value]) => value !== undefined);
    const points = known.map(([value, index]) => `${first + index + 0.5},${(15 - (13 * (value ?? 0)) / top).toFixed(1)}`);
    this.#line.setAttribute('points', points.join(' '));
  }
}

