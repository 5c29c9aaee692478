// Images of a question: chosen, pasted or dropped, made small enough, and kept as data URLs.

const MAX_IMAGES = 8, MAX_IMAGE_SIDE = 2048;
/** Largest file that goes as it is, in bytes; larger ones are written again as JPEG, without what a camera noted. */
const MAX_IMAGE_BYTES = 2 ** 20;
/** Largest file that is opened, in bytes. */
const MAX_FILE_BYTES = 64 * 2 ** 20;
const IMAGE_TYPES = ['image/png', 'image/jpeg', 'image/webp', 'image/gif'];

let attached = [];  // data URLs of the next question
let opening = 0;    // choices of files that are not attached yet

function showImages(parent, urls, remove) {
  const list = make(parent, 'ul', 'images', '', { 'aria-label': 'Images' });
  urls.forEach((url, place) => {
    const item = make(list, 'li');
    make(item, 'img', '', '', { src: url, alt: `Image ${place + 1}` });
    if (remove) button(item, '×', () => remove(place), 'quiet', `Remove image ${place + 1}`);
  });
  return list;
}

function showAttached() {
  at('attached').replaceChildren();
  if (attached.length) {
    showImages(at('attached'), attached, (place) => {
      attached.splice(place, 1);
      showAttached();
      at('ask').focus();
    });
  }
}

/** Attaches what is an image; says what is none, or does not fit. */
async function attach(files) {
  opening += 1;
  for (const file of files) {
    const fault = await attachOne(file);
    if (fault) notice(fault);
  }
  opening -= 1;
  showAttached();
  at('ask').focus();
}

/** Attaches one file; resolves to what is wrong with it. */
async function attachOne(file) {
  const name = file.name || 'This';
  if (attached.length >= MAX_IMAGES) return `A question takes at most ${MAX_IMAGES} images.`;
  if (file.size > MAX_FILE_BYTES) return `${name} is larger than ${MAX_FILE_BYTES >> 20} MiB.`;
  let url;
  try {
    url = await dataUrl(file);
  } catch {
    return `${name} is no image that the browser can read.`;
  }
  const asked = attached.reduce((sum, each) => sum + each.length, url.length);
  if (asked > MAX_SENT_CHARS) return `${name} does not fit: a question takes at most ${MAX_SENT_CHARS >> 20} MiB.`;
  if (asked + sizeOf(chat.current) > MAX_CONVERSATION_CHARS) {
    return `${name} does not fit: a conversation keeps at most ${MAX_CONVERSATION_CHARS >> 20} MiB. Begin a new chat.`;
  }
  attached.push(url);
  return '';
}

async function dataUrl(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, MAX_IMAGE_SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= MAX_IMAGE_BYTES && IMAGE_TYPES.includes(file.type)) return readFile(file);
  const canvas = make(null, 'canvas');
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const pencil = canvas.getContext('2d');
  pencil.fillStyle = '#fff';
  pencil.fillRect(0, 0, canvas.width, canvas.height);
  pencil.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL('image/jpeg', 0.9);
}

function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function imagesIn(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith('image/'));
}

/** Whether the chosen model sees images. */
function takesImages() {
  return !at('attach').hidden;
}

/** Lets images in while the chosen model takes them. */
function allowImages(allowed) {
  at('attach').hidden = !allowed;
  if (!allowed && attached.length) {
    attached = [];
    showAttached();
    announce('The chosen model takes no images.');
  }
}

function listenForImages() {
  at('attach').addEventListener('click', () => at('files').click());
  at('files').addEventListener('change', () => {
    attach([...at('files').files]);
    at('files').value = '';
  });
  const taken = (event, transfer) => {
    const files = takesImages() ? imagesIn(transfer) : [];
    if (!files.length) return;
    event.preventDefault();
    attach(files);
  };
  at('ask').addEventListener('paste', (event) => taken(event, event.clipboardData));
  document.addEventListener('drop', (event) => taken(event, event.dataTransfer));
  document.addEventListener('dragover', (event) => {
    if (takesImages() && event.dataTransfer.types.includes('Files')) event.preventDefault();
  });
}
