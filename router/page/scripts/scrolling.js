// The conversation follows its end while a person looks at the end, and stays where it is otherwise.

/** How near to its end a conversation is followed, in pixels. */
const NEAR_PX = 80;

function isNearEnd() {
  const log = at('log');
  return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
}

function scrollToEnd() {
  at('log').scrollTop = at('log').scrollHeight;
  showLatest();
}

function showLatest() {
  at('latest').hidden = isNearEnd();
}

/** Runs what changes the conversation, and follows its end. */
function following(change) {
  const near = isNearEnd();
  change();
  if (near) scrollToEnd();
  else showLatest();
}

function listenToScrolling() {
  at('log').addEventListener('scroll', showLatest);
  new ResizeObserver(() => (at('latest').hidden ? scrollToEnd() : showLatest())).observe(at('log'));
  at('latest').addEventListener('click', () => {
    scrollToEnd();
    at('ask').focus();
  });
}
