"use strict";
// The search runs in a worker. Browsers start none for pages that are opened as files: there a hidden frame does its work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = (this.scope = this.frame.contentWindow);
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      scope.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.load(url).then(() => {
        for (const data of this.waiting.splice(0)) this.deliver(data);
        this.waiting = null;
      });
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.scope.document.createElement("script");
        Object.assign(script, { src: url, onload: done, onerror: failed });
        this.scope.document.body.append(script);
      });
    }
    deliver(data) {
      this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }));
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.deliver(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
