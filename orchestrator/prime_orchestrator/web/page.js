// Draws each Status that /v1/events sends. Text only ever enters through textContent.
"use strict";

const at = (id) => document.getElementById(id);
const short = (hex) => (hex && hex.length > 14 ? hex.slice(0, 8) + "…" + hex.slice(-4) : hex || "–");
const tone = { active: "good", confirmed: "good", executed: "bad", ejected: "bad",
               quarantined: "warn", failed: "bad", silent: "warn", shadow: "dim" };

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Unix seconds as HH:MM UTC, with the date if it is not of the day before `now`.
function clock(seconds, now) {
  const iso = new Date(seconds * 1000).toISOString();
  return `${now - seconds < 86400 ? "" : iso.slice(0, 10) + " "}${iso.slice(11, 16)} UTC`;
}

// A link to the chain's explorer; on a chain without one, to what the API says of it.
let explorer = "";
function link(kind, hex) {
  const made = document.createElement("a");
  made.append(element("code", short(hex)));
  made.title = hex;
  if (kind === "submissions" || !explorer) made.href = `/v1/${kind}/${hex}`;
  else made.href = `${explorer}/${kind === "transactions" ? "tx" : "address"}/${hex}`;
  return made;
}

function cell(child) {
  const made = document.createElement("td");
  made.append(child);
  return made;
}

// Whole wei, as text, in PRIME.
function tokens(wei) {
  const digits = wei.padStart(19, "0");
  const part = digits.slice(-18).replace(/0+$/, "");
  return `${digits.slice(0, -18)}${part ? "." + part : ""} PRIME`;
}

// At most `most` round numbers from `low` to `high`.
function ticks(low, high, most) {
  const raw = Math.max((high - low) / Math.max(1, most), 1e-9);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= raw - 1e-12);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9; i++) found.push(i * step);
  return found;
}

// Draws lines in an SVG of the page's own pixels, with the values of both axes. `lines` are
// [points, opacity]; points are [x, y] in the axes' units, y from 0 to 1.
function chart(id, lines, low, high, x, y) {
  const svg = at(id), width = Math.max(200, svg.clientWidth), height = 220;
  const left = 46, right = 16, top = 10, bottom = 26;
  const across = (value) => left + ((value - low) * (width - left - right)) / (high - low || 1);
  const up = (value) => height - bottom - value * (height - top - bottom);
  const add = (tag, attributes, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    svg.append(made);
  };
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  for (const level of [0, 0.25, 0.5, 0.75, 1]) {
    add("line", { x1: left, x2: width - right, y1: up(level), y2: up(level) });
    add("text", { x: left - 6, y: up(level) + 4, "text-anchor": "end" }, y(level));
  }
  for (const value of ticks(low, high, Math.floor(width / 90))) {
    add("text", { x: across(value), y: height - 8, "text-anchor": "middle" }, x(value));
  }
  for (const [points, opacity] of lines) {
    const drawn = points.map((point) => `${across(point[0]).toFixed(1)},${up(point[1]).toFixed(1)}`);
    if (drawn.length === 1) add("circle", { cx: across(points[0][0]), cy: up(points[0][1]), r: 3 });
    else add("polyline", { points: drawn.join(" "), opacity });
  }
}

function drawCurve(batches) {
  const points = batches.map((batch) => [
    batch.step, Math.max(0, Math.min(1, batch.mean_reward_micro / 1e6)),
  ]);
  const first = batches.length ? batches[0].step : 0, last = batches.length ? batches.at(-1).step : 1;
  const whole = (value) => (Number.isInteger(value) ? value : "");
  chart("curve", points.length ? [[points, 1]] : [], first, last, whole, (level) => level.toFixed(2));
  at("curve-words").textContent = batches.length ? `mean reward, by step (${first} to ${last})`
    : "no batch yet";
}

// One rising stair a policy: each time lifts it by the share of the nodes that it stands for; the newest is boldest.
function drawReach(reach) {
  const longest = Math.max(1000, ...reach.map((policy) => policy.after_ms.at(-1) ?? 0)) / 1000;
  const lines = reach.map((policy, i) => {
    const times = Math.max(1, policy.after_ms.length);
    const share = policy.arrived / times / Math.max(1, policy.nodes, policy.arrived);
    const points = [[0, 0]];
    policy.after_ms.forEach((after, n) => {
      points.push([after / 1000, n * share], [after / 1000, (n + 1) * share]);
    });
    points.push([longest, policy.after_ms.length * share]);
    return [points, (0.2 + (0.8 * (i + 1)) / reach.length).toFixed(2)];
  });
  const seconds = (value) => `${Number(value.toFixed(2))} s`;
  chart("reach", lines, 0, longest, seconds, (level) => `${level * 100} %`);
  const newest = reach.at(-1);
  at("reach-words").textContent = newest
    ? `policy ${newest.version}: ${newest.arrived} of ${newest.nodes} nodes` : "no policy yet";
  at("reach-to").textContent = newest ? `${longest.toFixed(1)} s after publication` : "";
}

function cards(node) {
  const found = element("td", node.cards || "–", node.cards_trouble ? "warn" : "");
  const measured = new Date(1000 * node.cards_measured_at).toISOString().slice(0, 16);
  const proved = node.proved_memory_mb ? `${node.proved_memory_mb} MiB` : "none";
  const memory = `${node.claimed_memory_mb} MiB of memory a card claimed, ${proved} proved`;
  const about = node.cards_measured_at ? `measured ${measured} UTC; ${memory}` : "";
  found.title = node.cards_trouble || about;
  return found;
}

function drawNodes(status) {
  at("nodes").replaceChildren(...status.nodes.map((node) => {
    const row = document.createElement("tr");
    const age = Math.max(0, status.time - node.last_heartbeat);
    row.append(
      cell(link("nodes", node.node)),
      element("td", node.status, tone[node.status]),
      cards(node),
      element("td", node.speed_class),
      element("td", node.policy_version ?? "–"),
      element("td", node.last_heartbeat ? `${age} s ago` : "–"),
      element("td", node.accepted),
      element("td", node.rejected, node.rejected ? "bad" : ""),
      element("td", node.void),
      element("td", node.expired_unjudged, node.expired_unjudged ? "warn" : ""),
      element("td", node.units.toLocaleString()),
    );
    return row;
  }));
}

function drawTargets(targets) {
  const sum = (name) => targets.reduce((all, one) => all + one[name], 0);
  const share = (one, name) => `${one[name]} (${sum(name) ? Math.round((100 * one[name]) / sum(name)) : 0} %)`;
  at("targets").replaceChildren(...targets.map((one) => {
    const row = document.createElement("tr");
    row.append(element("td", one.target));
    for (const name of ["asked", "accepted", "sealed", "trained"]) row.append(element("td", share(one, name)));
    row.append(element("td", one.starving ? "starves" : "", "bad"));
    return row;
  }));
}

function drawEvaluations(status) {
  at("held-out").hidden = status.evaluations.length === 0;
  at("evaluations").replaceChildren(...status.evaluations.slice().reverse().map((one) => {
    const row = document.createElement("tr");
    const reward = one.reward === null ? "–" : one.reward.toFixed(3);
    row.append(
      element("td", one.policy_version),
      element("td", `${one.answered} of ${one.problems}`),
      element("td", one.rows),
      element("td", one.interval === null ? reward : `${reward} ± ${one.interval.toFixed(3)}`),
      element("td", clock(one.started_at, status.time)),
      element("td", one.ended_at === null ? "running" : "", "warn"),
    );
    return row;
  }));
}

function drawValidators(validators) {
  const share = (wrong, all) => (all ? `${wrong} of ${all}` : "–");
  at("validators").replaceChildren(...validators.map((one) => {
    const row = document.createElement("tr");
    row.append(
      cell(link("validators", one.validator)),
      element("td", one.opinions),
      element("td", one.overruled, one.overruled ? "warn" : ""),
      element("td", share(one.accused, one.honest), one.accused ? "bad" : ""),
      element("td", share(one.missed, one.lying), one.missed ? "warn" : ""),
    );
    return row;
  }));
}

function drawList(id, items, parts) {
  at(id).replaceChildren(...(items.length
    ? items.slice().reverse().map((item) => {
        const line = document.createElement("li");
        line.append(element("span", item.status, tone[item.status]), " ", ...parts(item));
        return line;
      })
    : [element("li", "none")]));
}

// How the pool does, from what the orchestrator says and, if it says nothing, from when it last did.
let latest = null, endedAt = null, lost = false;
function drawState() {
  let text = "connecting…", kind = "";
  if (latest !== null) {
    const since = (seconds) => clock(seconds, Math.max(latest.time, Date.now() / 1000));
    if (endedAt !== null) [text, kind] = [`ended at ${since(endedAt)}: the orchestrator stopped`, "warn"];
    else if (latest.activity === "ended") {
      [text, kind] = [`ended at ${since(latest.activity_since)}: the pool closed on chain`, "warn"];
    } else if (lost) [text, kind] = [`no answer since ${since(latest.time)}, trying again…`, "warn"];
    else if (latest.activity === "stalled") {
      [text, kind] = [`stalled since ${since(latest.activity_since)}`, "bad"];
    } else [text, kind] = ["live", "good"];
  } else if (lost) [text, kind] = ["no answer, trying again…", "warn"];
  if (at("link").textContent !== text) at("link").textContent = text;
  at("link").className = kind;
}

function draw(status) {
  explorer = status.explorer;
  document.title = `${status.name} · step ${status.step}`;
  at("name").textContent = status.name;
  at("step").textContent = status.step;
  at("version").textContent = status.latest_version ?? "–";
  const last = status.batches.at(-1);
  at("reward").textContent = last ? (last.mean_reward_micro / 1e6).toFixed(3) : "–";
  at("staleness").textContent = last ? last.staleness_max : "–";
  for (const kind of ["accepted", "rejected", "void"]) at(kind).textContent = status.files[kind] ?? 0;
  at("unjudged").textContent = status.expired_unjudged;
  at("shadow").textContent = Object.values(status.shadow_files).reduce((sum, n) => sum + n, 0);
  at("chain").textContent = status.chain_reachable ? "live" : "silent";
  at("chain").className = status.chain_reachable ? "good" : "warn";
  drawCurve(status.batches);
  drawReach(status.reach);
  drawNodes(status);
  drawTargets(status.targets);
  drawEvaluations(status);
  drawValidators(status.validators);
  at("share").textContent = status.compute_share === null ? "–" : status.compute_share.toFixed(2);
  drawList("slashes", status.slashes, (item) => [
    link("nodes", item.node), ` for ${item.reason}: ${tokens(item.amount)}, file `,
    link("submissions", item.submission),
    ...(item.transaction ? [", transaction ", link("transactions", item.transaction)] : []),
  ]);
  drawList("transactions", status.transactions, (item) => [
    `${item.kind} `, ...(item.hash ? [link("transactions", item.hash)] : []),
  ]);
}

const SILENT_MS = 15000;
let silence;
function answered() {
  lost = false;
  clearTimeout(silence);
  silence = setTimeout(unanswered, SILENT_MS);
}
function unanswered() {
  lost = true;
  drawState();
}

const events = new EventSource("/v1/events");
events.onmessage = (event) => {
  answered();
  [latest, endedAt] = [JSON.parse(event.data), null];
  drawState();
  draw(latest);
};
events.addEventListener("end", (event) => {
  endedAt = Number(event.data);
  drawState();
});
events.onerror = unanswered;
addEventListener("resize", () => latest !== null && draw(latest));
