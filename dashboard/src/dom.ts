// Creates and changes elements. Texts are never parsed as markup, and the page's content security policy forbids that.

type Child = Node | string | undefined | false;
type Props = Record<string, string | boolean | number | undefined | ((event: Event) => void)>;

/** Creates an element. Functions are event listeners of that name; other properties are attributes. */
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

/** Creates an SVG element. */
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

/** Sets a text only if it differs, so that screen readers and selections are not disturbed. */
export function say(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets an attribute only if it differs; undefined removes it. */
export function mark(element: Element, name: string, value: string | undefined): void {
  if (value === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/** Keeps one element for each item, in the order of the items. Elements exist as long as their items, and keep the focus. */
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
        // Moving a focused element removes the focus, so the elements before it are moved behind it instead.
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
