/* `--append-eod` is the name of an option: to the search engine a leading dash would exclude the word. */
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const query = message && message.type === 2 && typeof message.data === "string";
  return post.call(this, query ? { ...message, data: message.data.replace(/(^|\s)-+(?=\w)/g, "$1") } : message, ...rest);
};
