// Dictation: what is said into the microphone is transcribed by a model that hears, into the field of the message.

/** Longest recording, in ms. */
const MAX_RECORDING_MS = 300_000;
/** Rate at which speech is sent, in samples a second: five minutes take less than 10 MiB. */
const SPEECH_HZ = 16_000;
/** Longest wait for a transcription, in ms. */
const TRANSCRIBE_MS = 120_000;
const DICTATION_LABELS = {
  idle: ['Dictate', 'Dictate'], recording: ['Stop', 'Stop recording'], waiting: ['…', 'Transcribing'],
};

class Dictation {
  constructor() {
    this.model = '';      // that transcribes; empty: none does
    this.state = 'idle';
    this.recorder = null;
    this.isWanted = true;
  }

  /** Shows the button if there is a model, and a microphone: browsers offer none to pages over HTTP from elsewhere. */
  allow(model) {
    if (this.state !== 'idle') return;
    this.model = model;
    at('dictate').hidden = !model || !navigator.mediaDevices?.getUserMedia || !window.MediaRecorder;
  }

  /** Begins or ends a recording; resolves when its text is in the field. */
  async press() {
    if (this.state !== 'idle') {
      this.recorder?.stop();
      return;
    }
    this.isWanted = true;
    this.show('waiting');
    try {
      const sound = await this.record();
      if (this.isWanted && !sound.size) notice('Nothing was recorded.');
      else if (this.isWanted) insertText(await transcribed(sound, this.model));
    } catch (error) {
      const isForbidden = error.name === 'NotAllowedError';
      notice(isForbidden ? 'The browser does not allow the microphone.' : `Not transcribed: ${error.message}`);
    }
    this.show('idle');
    at('ask').focus();
  }

  /** Throws a recording away; returns whether there was one. */
  cancel() {
    if (this.state !== 'recording') return false;
    this.isWanted = false;
    this.recorder.stop();
    announce('The recording is thrown away.');
    return true;
  }

  /** Resolves to what was said until `recorder.stop()`, or for the longest time. */
  async record() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const parts = [], recorder = new MediaRecorder(stream);
    let timer;
    try {
      const ended = new Promise((resolve, reject) => {
        recorder.onstop = resolve;
        recorder.onerror = ({ error }) => reject(error ?? new Error('the recording failed'));
      });
      recorder.ondataavailable = ({ data }) => parts.push(data);
      recorder.start();
      timer = setTimeout(() => recorder.state === 'recording' && recorder.stop(), MAX_RECORDING_MS);
      this.recorder = recorder;
      this.show('recording');
      announce('Recording. Press again to stop, Escape to throw it away.');
      await ended;
    } finally {
      clearTimeout(timer);
      this.recorder = null;
      stream.getTracks().forEach((track) => track.stop());
    }
    this.show('waiting');
    return new Blob(parts, { type: recorder.mimeType });
  }

  show(state) {
    this.state = state;
    [at('dictate').textContent] = DICTATION_LABELS[state];
    at('dictate').setAttribute('aria-label', DICTATION_LABELS[state][1]);
    at('dictate').disabled = state === 'waiting';
  }
}

/** The text of a recording. */
async function transcribed(sound, model) {
  announce('Transcribing.');
  const form = new FormData();
  form.append('model', model);
  form.append('file', await wavOf(sound), 'speech.wav');
  const signal = AbortSignal.timeout(TRANSCRIBE_MS);
  const response = await fetch('v1/audio/transcriptions', { method: 'POST', headers: authorized(), body: form, signal });
  if (!response.ok) throw new Error(await reason(response));
  return (await response.json()).text.trim();
}

/** A recording as a WAV file of one channel, which every engine reads. */
async function wavOf(sound) {
  const found = await new OfflineAudioContext(1, 1, SPEECH_HZ).decodeAudioData(await sound.arrayBuffer());
  const channels = Array.from({ length: found.numberOfChannels }, (_, number) => found.getChannelData(number));
  const samples = Int16Array.from({ length: found.length }, (_, number) => {
    const level = channels.reduce((sum, each) => sum + each[number], 0) / channels.length;
    return Math.max(-1, Math.min(1, level)) * 0x7fff;
  });
  const riff = 0x46464952, wave = 0x45564157, fmt = 0x20746d66, data = 0x61746164, size = samples.byteLength;
  // 16 bytes of format: PCM of one channel, samples and bytes a second, 2 bytes of 16 bits a sample
  const format = [fmt, 16, 0x10001, SPEECH_HZ, 2 * SPEECH_HZ, 0x100002];
  return new Blob([Uint32Array.of(riff, 36 + size, wave, ...format, data, size), samples], { type: 'audio/wav' });
}

/** Puts a text where the cursor is. */
function insertText(text) {
  const field = at('ask'), { selectionStart: start, selectionEnd: end, value } = field;
  const gap = start && text && !/\s/.test(value[start - 1]) ? ' ' : '';
  field.setRangeText(`${gap}${text}`, start, end, 'end');
  field.dispatchEvent(new Event('input'));
  announce(text ? `Transcribed: ${shortened(text, 200)}` : 'Nothing was said.');
}
