'use strict';
// Small helpers over the DOM. Text from models, tools and users reaches the page only as text nodes.

const at = (id) => document.getElementById(id);

/** Appends an element to `parent`. Attributes of the value false are left out, true ones are empty. */
function make(parent, tag, kind = '', text = undefined, attributes = {}) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) node.setAttribute(name, value === true ? '' : value);
  }
  parent?.append(node);
  return node;
}

function button(parent, label, press, kind = 'quiet', name = undefined) {
  const node = make(parent, 'button', kind, label, { type: 'button', 'aria-label': name ?? false });
  node.addEventListener('click', () => press(node));
  return node;
}

/** Tells users of screen readers what happened. */
function announce(text) {
  at('told').textContent = text;
}

/** A random name. `crypto.randomUUID` is missing where a page comes over plain HTTP from another machine. */
function randomName() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}

/** What `localStorage` or `sessionStorage` holds; null where the browser keeps nothing, as when cookies are blocked. */
function readKept(area, name) {
  try {
    return window[area].getItem(name);
  } catch {
    return null;
  }
}

function writeKept(area, name, value) {
  try {
    window[area].setItem(name, value);
  } catch {
    // The fields of this page still hold it.
  }
}

/** Copies a text and says so on the button. The Clipboard API is missing over plain HTTP, too. */
async function copy(text, node) {
  const label = node.textContent;
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = copyBySelection(text, node.parentElement);
  }
  node.textContent = copied ? 'Copied' : 'Not copied';
  announce(copied ? 'Copied to the clipboard.' : 'The browser did not allow copying.');
  node.focus();
  setTimeout(() => { node.textContent = label === 'Copied' || label === 'Not copied' ? 'Copy' : label; }, 1500);
}

function copyBySelection(text, parent) {
  const field = make(parent, 'textarea', 'hidden', text, { readonly: true, 'aria-hidden': 'true' });
  field.select();
  const copied = document.execCommand('copy');
  field.remove();
  return copied;
}

/** Offers a text as a file. */
function download(name, type, text) {
  const link = make(null, 'a', '', '', { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
