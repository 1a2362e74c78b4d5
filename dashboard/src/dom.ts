// Making and changing elements. Text is text: nothing here reads markup, and the page's policy forbids it.

type Child = Node | string | undefined | false;
type Props = Record<string, string | boolean | number | undefined | ((event: Event) => void)>;

/** An element. A property that is a function listens to the event of that name; others are attributes. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === 'function') element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, '');
    else if (value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child): child is Node | string => child !== undefined && child !== false));
  return element;
}

const SVG = 'http://www.w3.org/2000/svg';

/** The same for pictures. */
export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  props: Record<string, string | number> = {},
  ...children: Node[]
): SVGElementTagNameMap[K] {
  const element = document.createElementNS(SVG, tag);
  Object.entries(props).forEach(([name, value]) => element.setAttribute(name, String(value)));
  element.append(...children);
  return element;
}

/** Changes a text only where it is another one: a screen reader and a selection are not disturbed for nothing. */
export function say(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** The same for an attribute; undefined takes it away. */
export function mark(element: Element, name: string, value: string | undefined): void {
  if (value === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/** Has a part of one element for each item, in their order. Parts stay as long as their items do, and keep the focus. */
export class Parts<T, P extends { root: Element }> {
  readonly #known = new Map<string, P>();

  constructor(
    private readonly container: Element,
    private readonly key: (item: T) => string,
    private readonly make: (item: T) => P,
    private readonly update: (part: P, item: T) => void,
  ) {}

  show(items: readonly T[]): void {
    const gone = new Set(this.#known.keys());
    let place: Element | null = this.container.firstElementChild;
    for (const item of items) {
      const key = this.key(item);
      gone.delete(key);
      let part = this.#known.get(key);
      if (!part) {
        part = this.make(item);
        this.#known.set(key, part);
      }
      this.update(part, item);
      if (part.root === place) {
        place = place.nextElementSibling;
      } else if (!part.root.contains(document.activeElement)) {
        this.container.insertBefore(part.root, place);
      } else {
        // What has the focus loses it when it is moved: what stands before it moves behind it instead.
        while (place && place !== part.root) {
          const next: Element | null = place.nextElementSibling;
          this.container.append(place);
          place = next;
        }
        place = part.root.nextElementSibling;
      }
    }
    for (const key of gone) {
      this.#known.get(key)?.root.remove();
      this.#known.delete(key);
    }
  }
}
