// Conversations in the browser's own database, within bounds; in memory where the browser keeps nothing.

const MAX_CONVERSATIONS = 200;
/** Most that all conversations take together, in characters. */
const MAX_STORED_CHARS = 64 * 2 ** 20;
/** Most that one conversation takes with further images, so that it does not push out all others. */
const MAX_CONVERSATION_CHARS = 24 * 2 ** 20;
const HEADS = 'heads', WHOLE = 'conversations';

class Store {
  constructor() {
    this.opened = null;
    this.memory = new Map();  // whole conversations, where there is no database
    this.removed = new Set(); // ids that late answers must not bring back
    this.fault = '';          // why nothing is kept
  }

  open() {
    this.opened ??= new Promise((resolve) => {
      const failed = (error) => {
        this.fault = `This browser keeps no conversations (${error?.message ?? 'blocked'}).`;
        resolve(null);
      };
      try {
        const request = indexedDB.open('kvferry', 1);
        request.onupgradeneeded = () => {
          for (const name of [HEADS, WHOLE]) request.result.createObjectStore(name, { keyPath: 'id' });
        };
        request.onsuccess = () => resolve(request.result);
        request.onerror = () => failed(request.error);
      } catch (error) {
        failed(error);
      }
    });
    return this.opened;
  }

  /** Runs `work` on the two tables in one transaction; resolves to its request's result. */
  async run(mode, work) {
    const database = await this.open();
    return new Promise((resolve, reject) => {
      const change = database.transaction([HEADS, WHOLE], mode);
      const request = work(change.objectStore(HEADS), change.objectStore(WHOLE));
      change.oncomplete = () => resolve(request?.result);
      change.onabort = change.onerror = () => reject(change.error);
    });
  }

  /** Heads ({ id, title, updated, size }) of all conversations, latest first. */
  async heads() {
    const heads = await this.open() ? await this.run('readonly', (table) => table.getAll())
      : [...this.memory.values()].map(headOf);
    return heads.sort((one, other) => other.updated - one.updated);
  }

  async get(id) {
    if (!await this.open()) return this.memory.get(id);
    return this.run('readonly', (_, table) => table.get(id));
  }

  /** Keeps a conversation. The oldest others go where there are too many. */
  async put(conversation) {
    if (this.removed.has(conversation.id)) return;
    if (!await this.open()) {
      this.memory.set(conversation.id, conversation);
      return;
    }
    try {
      await this.run('readwrite', (heads, table) => {
        heads.put(headOf(conversation));
        table.put(conversation);
      });
      this.fault = '';
    } catch (error) {
      this.fault = `This conversation is not kept: ${error?.message ?? 'the browser refused'}`;
    }
    let count = 0, size = 0;
    for (const head of await this.heads()) {
      count += 1;
      size += head.size;
      const over = count > MAX_CONVERSATIONS || size > MAX_STORED_CHARS;
      if (over && head.id !== conversation.id) await this.remove(head.id);
    }
  }

  async remove(id) {
    this.removed.add(id);
    this.memory.delete(id);
    if (await this.open()) await this.run('readwrite', (heads, table) => [heads.delete(id), table.delete(id)].at(-1));
  }

  /** Takes a removed conversation back. */
  async restore(conversation) {
    this.removed.delete(conversation.id);
    await this.put(conversation);
  }

  async all() {
    if (!await this.open()) return [...this.memory.values()];
    return this.run('readonly', (_, table) => table.getAll());
  }
}

function headOf(conversation) {
  return { id: conversation.id, title: conversation.title, updated: conversation.updated, size: sizeOf(conversation) };
}
