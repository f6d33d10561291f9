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

function drawCurve(batches) {
  const svg = at("curve");
  svg.replaceChildren();
  const add = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    svg.append(made);
  };
  for (const level of [0.25, 0.5, 0.75]) {
    const y = 220 - level * 220;
    add("line", { x1: 0, x2: 800, y1: y, y2: y });
  }
  const points = batches.map((batch, i) => {
    const x = batches.length > 1 ? (i * 800) / (batches.length - 1) : 0;
    const reward = Math.max(0, Math.min(1, batch.mean_reward_micro / 1e6));
    return `${x.toFixed(1)},${(220 - reward * 220).toFixed(1)}`;
  });
  if (points.length) add("polyline", { points: points.join(" ") });
  at("axis-from").textContent = batches.length ? `step ${batches[0].step}` : "no batch yet";
  at("axis-to").textContent = batches.length ? `step ${batches.at(-1).step}` : "";
}

// One rising stair a policy: each arrival lifts it by one node's share; the newest is drawn boldest.
function drawReach(reach) {
  const svg = at("reach");
  svg.replaceChildren();
  const longest = Math.max(1000, ...reach.map((policy) => policy.after_ms.at(-1) ?? 0));
  reach.forEach((policy, i) => {
    const share = 1 / Math.max(1, policy.nodes, policy.after_ms.length);
    const points = ["0,220"];
    policy.after_ms.forEach((after, n) => {
      const x = ((after * 800) / longest).toFixed(1);
      points.push(`${x},${(220 - n * share * 216).toFixed(1)}`, `${x},${(220 - (n + 1) * share * 216).toFixed(1)}`);
    });
    points.push(`800,${(220 - policy.after_ms.length * share * 216).toFixed(1)}`);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("points", points.join(" "));
    line.setAttribute("opacity", (0.2 + (0.8 * (i + 1)) / reach.length).toFixed(2));
    svg.append(line);
  });
  const newest = reach.at(-1);
  at("reach-words").textContent = newest
    ? `policy ${newest.version}: ${newest.after_ms.length} of ${newest.nodes} nodes` : "no policy yet";
  at("reach-to").textContent = newest ? `${(longest / 1000).toFixed(1)} s after publication` : "";
}

function drawNodes(status) {
  at("nodes").replaceChildren(...status.nodes.map((node) => {
    const row = document.createElement("tr");
    const address = document.createElement("td");
    address.append(element("code", short(node.node)));
    address.title = node.node;
    const heard = Math.max(0, status.time - node.last_heartbeat);
    row.append(
      address,
      element("td", node.status, tone[node.status]),
      element("td", node.speed_class),
      element("td", node.policy_version ?? "–"),
      element("td", node.last_heartbeat ? `${heard} s ago` : "–"),
      element("td", node.accepted),
      element("td", node.rejected, node.rejected ? "bad" : ""),
      element("td", node.void),
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
    for (const name of ["asked", "accepted", "trained"]) row.append(element("td", share(one, name)));
    row.append(element("td", one.starving ? "starves" : "", "bad"));
    return row;
  }));
}

function drawValidators(validators) {
  const share = (wrong, all) => (all ? `${wrong} of ${all}` : "–");
  at("validators").replaceChildren(...validators.map((one) => {
    const row = document.createElement("tr");
    const address = document.createElement("td");
    address.append(element("code", short(one.validator)));
    address.title = one.validator;
    row.append(
      address,
      element("td", one.opinions),
      element("td", one.overruled, one.overruled ? "warn" : ""),
      element("td", share(one.accused, one.honest), one.accused ? "bad" : ""),
      element("td", share(one.missed, one.lying), one.missed ? "warn" : ""),
    );
    return row;
  }));
}

function drawList(id, items, words) {
  at(id).replaceChildren(...(items.length
    ? items.slice().reverse().map((item) => {
        const line = document.createElement("li");
        line.append(element("span", item.status, tone[item.status]), element("span", " " + words(item) + " "),
                    element("code", short(item.hash || item.transaction || "")));
        return line;
      })
    : [element("li", "none")]));
}

function draw(status) {
  document.title = `${status.name} · step ${status.step}`;
  at("name").textContent = status.name;
  at("step").textContent = status.step;
  at("version").textContent = status.latest_version ?? "–";
  const last = status.batches.at(-1);
  at("reward").textContent = last ? (last.mean_reward_micro / 1e6).toFixed(3) : "–";
  at("staleness").textContent = last ? last.staleness_max : "–";
  for (const kind of ["accepted", "rejected", "void"]) at(kind).textContent = status.files[kind] ?? 0;
  at("shadow").textContent = Object.values(status.shadow_files).reduce((sum, n) => sum + n, 0);
  at("chain").textContent = status.chain_reachable ? "live" : "silent";
  at("chain").className = status.chain_reachable ? "good" : "warn";
  drawCurve(status.batches);
  drawReach(status.reach);
  drawNodes(status);
  drawTargets(status.targets);
  drawValidators(status.validators);
  at("share").textContent = status.compute_share === null ? "–" : status.compute_share.toFixed(2);
  drawList("slashes", status.slashes, (item) => `${short(item.node)} for ${item.reason}`);
  drawList("transactions", status.transactions, (item) => item.kind);
}

const events = new EventSource("/v1/events");
events.onmessage = (event) => {
  at("link").textContent = "live";
  at("link").className = "good";
  draw(JSON.parse(event.data));
};
events.onerror = () => {
  at("link").textContent = "connection lost, trying again…";
  at("link").className = "warn";
};
