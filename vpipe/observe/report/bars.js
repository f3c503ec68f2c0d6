"use strict";
// Horizontal bars: where each rank's time goes, and what each stage holds.

/** Shares of the time that the timeline shows. */
function showShares(timeline) {
  const { lanes, view, predictedLanes, anchoredAt } = timeline;
  byId("window").textContent = `in the ${duration(view.to - view.from)} that the timeline shows`;
  byId("anchor").textContent = anchoredAt ? ` Measured and predicted begin together at ${anchoredAt}.` : "";
  byId("shares").replaceChildren(...lanes.flatMap((lane, row) => shareRow(lane, view, predictedLanes && predictedLanes[row])));
}

function shareRow(lane, view, other) {
  const span = view.to - view.from;
  const times = timeOfKinds(lane, view.from, view.to);
  const parts = KINDS.map((kind, place) => {
    const share = times[place] / span;
    const title = `${kind.label}: ${percent(share)}, ${duration(times[place])}`;
    const part = element("i", { title, style: { width: `${100 * share}%` } });
    if (kind.key === "wait") part.className = "waiting";
    else part.style.background = `var(--${kind.key})`;
    return part;
  });
  const waiting = times[KIND.wait] / span;
  const computing = (times[KIND.forward] + times[KIND.backward] + times[KIND.weight] + times[KIND.update]) / span;
  const between = Math.max(0, 1 - times.reduce((a, b) => a + b, 0) / span);
  return [
    element("span", {}, `rank ${lane.rank}`),
    element("div", { class: "bar", "data-rank": lane.rank, "data-wait": waiting.toFixed(6) }, ...parts),
    element(
      "span",
      { class: "value" },
      `${percent(computing)} computing · ${percent(waiting)} waiting · bubble ${percent(waiting + between)}` +
        (other ? `, predicted ${percent(other.bubble)}` : ""),
    ),
  ];
}

/** The peak of each stage, and what was predicted for it, if anything. */
function showMemory(run) {
  const peaks = run.summary.peak_memory || [];
  byId("memory").hidden = !peaks.length;
  const foreseen = (run.plan.prediction && run.plan.prediction.peak_memory) || [];
  const predicted = foreseen.length === peaks.length ? foreseen : [];
  const most = Math.max(...peaks, ...predicted);
  byId("memory-note").textContent = predicted.length
    ? "The most that the process of each stage held (libraries included), and the plan's prediction as a red mark."
    : "The most that the process of each stage held, libraries included.";
  byId("memory-bars").replaceChildren(
    ...peaks.flatMap((peak, stage) => {
      const bar = element("div", { class: "bar" }, element("i", { style: { width: `${(100 * peak) / most}%`, background: "var(--forward)" } }));
      let text = bytes(peak);
      if (predicted.length) {
        bar.append(element("u", { style: { left: `calc(${(100 * predicted[stage]) / most}% - 2px)` } }));
        text += ` · predicted ${bytes(predicted[stage])}`;
      }
      return [element("span", {}, `stage ${stage}`), bar, element("span", { class: "value" }, text)];
    }),
  );
}
