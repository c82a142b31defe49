// The live page: asks /ui/state every second for what is new and draws it. Text goes in as text, never as HTML.

const KEEP_REQUESTS = 200, KEEP_SAMPLES = 600, EVERY_MS = 1000, PATIENCE_MS = 5000;
const PARTS = ["gateway_queue", "prefill_queue", "prefill", "link_wait", "transfer", "decode_queue", "first_step", "unknown"];
const $ = (id) => document.getElementById(id);
const kept = { started: 0, placed: [], moments: [], filter: "all", paused: false };
const failed = (one) => ["failed", "rejected"].includes(one.outcome);
const count = new Intl.NumberFormat("en");

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

async function ask() {
  const number = kept.placed.at(-1)?.number ?? 0, moment = kept.moments.at(-1)?.at ?? 0;
  return fetch(`/ui/state?number=${number}&moment=${moment}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
}

async function step() {
  try {
    const answer = await ask();
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    take(await answer.json());
  } catch (error) {
    say(`No answer from the gateway (${error.name === "TimeoutError" ? "too slow" : error.message}); trying again`, "bad");
  }
}

function say(text, state) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").dataset.state = state;
}

function take(view) {
  if (view.started !== kept.started) Object.assign(kept, { started: view.started, placed: [], moments: [] });
  kept.placed = [...kept.placed, ...view.placed].slice(-KEEP_REQUESTS);
  kept.moments = [...kept.moments, ...view.moments].slice(-KEEP_SAMPLES);
  $("policy").textContent = view.policy ? `${view.policy} · ${view.model}` : "";
  if (view.draining) say("Draining: takes nothing new", "bad");
  else if (view.threshold_tokens === null) say("No routing table yet", "bad");
  else say("Live", "");
  figures(view);
  clusters(view.clusters);
  chart(view.clusters.filter((one) => one.link).map((one) => one.name));
  if (view.placed.length || !kept.drawn) rows();
  parts();
}

// The mean of each part of the time to the first token. They add up: what a request lacks is in its `unknown`.
function parts() {
  const known = kept.placed.filter((one) => Object.keys(one.parts ?? {}).length);
  const means = PARTS.map((part) => [part.replace("_", " "), sum(known, (one) => one.parts[part] ?? 0) / known.length])
    .filter(([, mean]) => mean)
    .map(([part, mean]) => `${part} ${seconds(mean)}`);
  $("parts").textContent = known.length ? `First token, mean of ${count.format(known.length)}: ${means.join(", ")}` : "";
}

function figures(view) {
  const total = view.offloaded + view.local;
  const tokens = sum(kept.placed, (one) => one.tokens), cached = sum(kept.placed, (one) => one.cached_tokens);
  const firsts = kept.placed.map((one) => one.first_token_seconds).filter((one) => one !== null).sort((a, b) => a - b);
  const rule = view.mode === "Priced" ? "by price" : `${count.format(view.threshold_tokens)} tokens`;
  $("threshold").textContent = view.threshold_tokens === null ? "–" : rule;
  $("bandwidth").textContent = view.bandwidth ?? "–";
  $("in-flight").textContent = count.format(view.in_flight);
  $("offloaded").textContent = total ? `${percent(view.offloaded, total)} of ${count.format(total)}` : "–";
  $("cached").textContent = tokens ? percent(cached, tokens) : "–";
  $("first-token").textContent = firsts.length ? seconds(firsts[firsts.length >> 1]) : "–";
  $("failed").textContent = `${kept.placed.filter(failed).length} of ${kept.placed.length}`;
  $("reason").textContent = view.reason ? `Why this threshold: ${view.reason}` : "";
}

function clusters(all) {
  $("clusters").replaceChildren(...all.map((one, index) => {
    const card = make("article", { class: `cluster ${index ? "member" : "hub"}` });
    const where = index ? one.datacenter || "member cluster" : "decodes, and prefills what is short";
    card.append(make("h3", {}, one.name, " ", make("small", {}, where)));
    if (index) card.append(link(one));
    const list = make("ul");
    for (const instance of one.instances) list.append(chip(instance));
    card.append(one.instances.length ? list : make("p", { class: "warn" }, "No instance is ready"));
    return card;
  }));
}

function link(cluster) {
  const box = make("div", { class: "link" }), use = cluster.link;
  if (!cluster.reachable) return make("p", { class: "bad" }, "Not reachable");
  if (!cluster.in_use) box.append(make("p", { class: "bad" }, use ? `Not used: the link is ${use.state}` : "Not used"));
  if (!use) return box.append(`Link of ${count.format(cluster.capacity_mbps)} Mbit/s, not measured`), box;
  const part = use.utilisation_percent;
  const words = part === null ? "not measured yet" : `${Math.round(part)} % used`;
  box.append(`Link ${words}, ${count.format(Math.round(use.effective_mbps))} of ${count.format(cluster.capacity_mbps)} Mbit/s`);
  const bar = make("div", part > 80 ? { class: "full" } : {});
  bar.style.width = `${Math.min(100, part ?? 0)}%`;
  const meter = { class: "track", role: "meter", "aria-label": `Link to ${cluster.name}`, "aria-valuemin": 0,
    "aria-valuemax": 100, "aria-valuenow": Math.min(100, Math.round(part ?? 0)) };
  box.append(make("div", meter, bar));
  return box;
}

function chip(instance) {
  const busy = instance.in_flight ? `${instance.in_flight} in flight` : "idle";
  const item = make("li", {}, make("b", {}, instance.name), make("span", {}, `${instance.role}, ${busy}`));
  if (instance.ejected_seconds) item.append(make("span", { class: "bad" }, `failed, tried again in ${instance.ejected_seconds} s`));
  if (instance.state !== "Ready") item.append(make("span", { class: "warn" }, instance.state));
  return item;
}

function chart(names) {
  const svg = $("chart"), moments = kept.moments.filter((one) => one.threshold_tokens !== null);
  if (moments.length < 2) return;
  const end = moments.at(-1).at, start = Math.max(moments[0].at, end - KEEP_SAMPLES), span = Math.max(1, end - start);
  const top = 1.1 * Math.max(1, ...moments.map((one) => one.threshold_tokens));
  const x = (at) => (800 * (at - start)) / span, y = (part) => 210 - 200 * Math.min(1, part);
  const line = (points) => points.map(([at, part], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(part).toFixed(1)}`).join("");
  const steps = (points) => points.map(([at, part], index) =>
    index ? `H${x(at).toFixed(1)}V${y(part).toFixed(1)}` : `M${x(at).toFixed(1)} ${y(part).toFixed(1)}`).join("");
  const draw = (kind, d) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", d);
    return path;
  };
  const use = (name) => moments.flatMap((one) => one.links.filter((link) => link.cluster === name && link.utilisation_percent !== null)
    .map((link) => [one.at, link.utilisation_percent / 100]));
  const grid = [0, .5, 1].map((part) => `M0 ${y(part)}H800`).join("");
  svg.replaceChildren(draw("grid", grid), ...names.map((name) => draw("use", line(use(name)))),
    draw("threshold", steps(moments.map((one) => [one.at, one.threshold_tokens / top]))));
  const last = moments.at(-1), tokens = moments.map((one) => one.threshold_tokens);
  const ends = `${count.format(Math.min(...tokens))} to ${count.format(Math.max(...tokens))} tokens`;
  const uses = last.links.map((one) => `${one.cluster} ${Math.round(one.utilisation_percent ?? 0)} % used`).join(", ");
  svg.setAttribute("aria-label", `Threshold ${ends}, at present ${count.format(last.threshold_tokens)}. Links: ${uses || "not measured"}`);
  $("legend").replaceChildren(make("span", { class: "local" }, `━ threshold, ${ends}`),
    ...names.map((name) => make("span", { class: "offload" }, `┅ use of the link to ${name}, 0 to 100 %`)),
    make("span", {}, `over ${Math.round(span)} s`));
}

const COLUMNS = [
  ["Time", (one) => new Date(1000 * one.at).toLocaleTimeString()],
  ["Decision", (one) => make("span", { class: one.decision, title: one.why }, one.decision === "none" ? "–" : one.decision)],
  ["Tokens", (one) => count.format(one.tokens)],
  ["Cached", (one) => count.format(one.cached_tokens)],
  ["Prefilled by", (one) => (one.prefill ? `${one.prefill} (${one.cluster})` : "–")],
  ["Decoded by", (one) => one.decode || "–"],
  ["First token", (one) => (one.first_token_seconds === null ? "–" : seconds(one.first_token_seconds))],
  ["Outcome", (one) => make("span", { class: failed(one) ? "bad" : one.outcome === "ok" ? "" : "warn" },
    one.reason ? `${one.outcome}: ${one.reason}` : one.outcome)],
];

function rows() {
  kept.drawn = true;
  const shown = kept.placed.filter((one) => kept.filter === "all" || (kept.filter === "failed" ? failed(one) : one.decision === kept.filter));
  $("rows").replaceChildren(...shown.reverse().slice(0, 100).map((one) =>
    make("tr", {}, ...COLUMNS.map(([label, cell]) => make("td", { "data-label": label }, cell(one))))));
  $("nothing").hidden = shown.length > 0;
}

const sum = (all, of) => all.reduce((total, one) => total + of(one), 0);
const percent = (part, whole) => `${Math.round((100 * part) / whole)} %`;
const seconds = (value) => (value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`);

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  localStorage.setItem("theme", name);
}

$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("pause").addEventListener("click", () => {
  kept.paused = !kept.paused;
  $("pause").setAttribute("aria-pressed", kept.paused);
  say(kept.paused ? "Paused" : "Live", "");
});
for (const button of document.querySelectorAll("[data-filter]")) {
  button.addEventListener("click", () => {
    kept.filter = button.dataset.filter;
    for (const other of document.querySelectorAll("[data-filter]")) other.setAttribute("aria-pressed", other === button);
    rows();
  });
}
theme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
for (;;) {
  if (!kept.paused && !document.hidden) await step();
  await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
}
