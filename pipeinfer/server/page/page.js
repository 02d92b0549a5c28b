"use strict";
const USES = ["busy", "cancelled", "waiting", "idle"], N_SHOWN = 60;
const CHATS = "pipeinfer.chats", FIELDS = "pipeinfer.fields", OPENED = "pipeinfer.opened";  // the last is this tab's
const SAMPLING = {temperature: "temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p", repeat_penalty: "repeat_penalty",
                  tokens: "max_tokens", seed: "seed"};
const $ = id => document.getElementById(id);
const read = (key, otherwise, storage = "localStorage") => {  // it may be forbidden
  try { return JSON.parse(window[storage].getItem(key)) ?? otherwise; } catch { return otherwise; }
};
let chats = read(CHATS, []), chat = null, stopping = null, watching = null;

const isLost = error => error instanceof TypeError;  // so fetch and its readers say it
const reason = error => isLost(error) ? "The server does not answer, or the connection was lost" : error.message;
const headers = () => $("key").value ? {authorization: `Bearer ${$("key").value}`} : {};

function keep() {  // the oldest go where the browser has no more room
  for (;;) {
    try { return localStorage.setItem(CHATS, JSON.stringify(chats)); }
    catch { if (chats.length < 2) return; chats.pop(); }
  }
}

async function refused(answer) {
  const body = await answer.text();
  try { return JSON.parse(body).error.message; } catch { return `${answer.status}: ${body.slice(0, 200)}`; }
}

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
  catch { button.textContent = "Not allowed"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// -- server-sent events of an answer, one by one

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts)
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

// -- the chats that are kept

function open(which) {
  stopping?.abort();
  chat = which;
  try { sessionStorage.setItem(OPENED, chat.id); } catch { /* it is not kept then */ }
  $("system").value = chat.system ?? "";
  showList();
  showChat();
}

function begin() {
  if (!chat || chat.messages.length) open({id: Date.now(), title: "New chat", messages: []});
  close();
  $("text").focus();
}

function showList() {
  $("list").replaceChildren(...chats.map(each => element(
    "li", each === chat ? {"aria-current": "true"} : {},
    element("button", {type: "button", title: each.title, onclick: () => { open(each); close(); }}, each.title),
    element("button", {type: "button", ariaLabel: `Delete ${each.title}`, onclick: () => remove(each)}, "×"))));
}

function remove(which) {
  chats = chats.filter(each => each !== which);
  keep();
  if (which === chat) { chat = null; begin(); }
  showList();
}

const close = () => { $("chats").classList.remove("open"); $("menu").ariaExpanded = "false"; };

// -- one chat

function showChat() {
  $("said").replaceChildren(...chat.messages.map((message, at) => turn(message, at)));
  scroll(true);
}

function turn(message, at) {
  const text = element("div", {className: "text"}), found = element("div", {className: `turn ${message.role}`});
  found.append(element("b", {}, {user: "you", assistant: "model", error: "not served"}[message.role]));
  if (message.thought)
    found.append(element("details", {className: "thought", open: !message.content}, element("summary", {}, "Reasoning"), message.thought));
  text.append(message.role === "assistant" ? markdown(message.content) : message.content);
  found.append(text);
  if (at !== undefined) found.append(tools(message, at));
  return found;
}

function tools(message, at) {
  const button = (name, does) => element("button", {type: "button", onclick: does}, name), found = element("div", {className: "tools"});
  const copying = button("Copy", () => copy(message.content, copying));
  if (message.role !== "error") found.append(copying);
  if (message.role === "user") found.append(button("Edit", () => edit(at)));
  if (message.role !== "user" && at === chat.messages.length - 1) found.append(button("Regenerate", () => again(at)));
  if (message.note) found.append(element("small", {}, message.note));
  return found;
}

function edit(at) {
  if (stopping || at < 0) return;
  const text = element("textarea", {value: chat.messages[at].content, ariaLabel: "What you said"});
  const send = () => { if (text.value.trim()) { chat.messages.length = at; showChat(); say(text.value.trim()); } };
  text.addEventListener("keydown", event => {
    if (event.key === "Escape") { event.stopPropagation(); showChat(); $("text").focus(); }
    else if (sends(event)) { event.preventDefault(); send(); }
  });
  $("said").children[at].replaceChildren(text, element("div", {className: "tools"},
    element("button", {type: "button", onclick: send}, "Send"),
    element("button", {type: "button", onclick: showChat}, "Cancel")));
  text.focus();
}

function again(at) {
  if (stopping) return;
  while (chat.messages[at]?.role !== "user") at--;
  const {content} = chat.messages[at];
  chat.messages.length = at;
  showChat();
  say(content);
}

function scroll(always) {
  const said = $("said");
  if (always || said.scrollHeight - said.scrollTop - said.clientHeight < 120) said.scrollTop = said.scrollHeight;
}

function asked() {
  const found = {stream: true, return_progress: true};
  found.messages = chat.messages.filter(each => each.role !== "error").map(({role, content}) => ({role, content}));
  if (chat.system?.trim()) found.messages.unshift({role: "system", content: chat.system});
  for (const [id, name] of Object.entries(SAMPLING)) if ($(id).value !== "") found[name] = Number($(id).value);
  return found;
}

async function say(text) {
  const mine = chat, answer = {role: "assistant", content: "", thought: ""}, shown = [];
  if (!mine.messages.length) mine.title = text.slice(0, 60);
  if (!chats.includes(mine)) chats.unshift(mine);  // it is new, or another tab has deleted it
  showList();
  mine.messages.push({role: "user", content: text});
  showChat();
  stopping = new AbortController();
  busy(true);
  const body = JSON.stringify(asked());
  $("said").append(turn(answer));
  const draw = () => {
    shown.length = 0;
    if (mine !== chat) return;
    $("said").lastElementChild.replaceWith(turn(answer));
    $("said").lastElementChild.classList.add("coming");
    scroll();
  };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: {"content-type": "application/json", ...headers()}, body, signal: stopping.signal});
    if (!response.ok) throw new Error(await refused(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices, read = event.prompt_progress;
      answer.content += choice?.delta?.content ?? "";
      answer.thought += choice?.delta?.reasoning_content ?? "";
      if (read) state(`The model reads: ${read.processed} of ${read.total} tokens`);
      else state(answer.content || answer.thought ? "The model is writing" : "The model reads");
      if (choice?.finish_reason) answer.note = note(choice, event.timings);
      if (!shown.length) shown.push(requestAnimationFrame(draw));
    }
  } catch (error) {
    if (error.name === "AbortError") answer.note = "stopped";
    else mine.messages.push({role: "error", content: reason(error)});
  }
  shown.forEach(cancelAnimationFrame);
  if (answer.content || answer.thought) mine.messages.splice(mine.messages.findLastIndex(each => each.role === "user") + 1, 0, answer);
  stopping = null;
  busy(false);
  keep();
  if (mine === chat) showChat();
}

function note(choice, timings) {
  const speed = timings?.predicted_per_second, guesses = timings?.draft_n ? `guessed ahead ${timings.draft_n_accepted} of ${timings.contested_n}` : "";
  return [`${timings?.predicted_n} tokens`, speed ? `${speed.toFixed(1)} tokens/s` : "", timings?.ttft_s ? `first after ${timings.ttft_s.toFixed(2)} s` : "",
          guesses, `seed ${choice.seed}`, choice.finish_reason === "length" ? "cut at its length" : ""].filter(Boolean).join(", ");
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("said").ariaBusy = String(is);
  const last = chat.messages.at(-1);
  const ended = last?.role !== "assistant" ? "" : last.note === "stopped" ? "The answer was stopped" : "The answer is complete";
  state(is ? "Asking the model" : ended);
}

function state(text) {  // it is read aloud when it changes
  if ($("state").textContent !== text) $("state").textContent = text;
}

const sends = event => event.key === "Enter" && !event.shiftKey && !event.isComposing;
$("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || stopping) return;
  $("text").value = "";
  say(text);
});
$("text").addEventListener("keydown", event => {
  if (sends(event)) { event.preventDefault(); $("form").requestSubmit(); }
  else if (event.key === "ArrowUp" && !$("text").value && !stopping) edit(chat.messages.findLastIndex(each => each.role === "user"));
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  if (stopping) stopping.abort();
  else if (!$("drawer").hidden) { $("settings").click(); $("settings").focus(); }
  close();
});
$("stop").addEventListener("click", () => stopping?.abort());
$("clear").addEventListener("click", begin);
$("menu").addEventListener("click", () => { $("menu").ariaExpanded = String($("chats").classList.toggle("open")); });
$("settings").addEventListener("click", () => {
  $("drawer").hidden = !$("drawer").hidden;
  $("settings").ariaExpanded = String(!$("drawer").hidden);
});
$("system").addEventListener("input", () => { chat.system = $("system").value; keep(); });
for (const id of Object.keys(SAMPLING)) {
  $(id).value = read(FIELDS, {})[id] ?? $(id).value;
  $(id).addEventListener("change", () => localStorage.setItem(FIELDS, JSON.stringify({...read(FIELDS, {}), [id]: $(id).value})));
}

// -- the pipeline

const shown = new Map();

function draw({ranks, running, waiting}) {
  $("load").textContent = `${running} text${running === 1 ? "" : "s"} being written, ${waiting} waiting`;
  for (const rank of ranks) {
    const row = shown.get(rank.rank) ?? add(rank);
    row.past.push(rank);
    if (row.past.length > N_SHOWN) row.past.shift();
    row.now.textContent = `${Math.round(100 * rank.busy)}% busy`;
    paint(row);
  }
}

function add(rank) {
  const name = `rank ${rank.rank}: ${rank.role}`, row = {past: [], now: element("span"), canvas: element("canvas", {role: "img", ariaLabel: name})};
  $("ranks").append(element("div", {className: "rank"}, element("div", {}, element("span", {title: name}, name), row.now), row.canvas));
  shown.set(rank.rank, row);
  return row;
}

function paint({canvas, past}) {
  const scale = devicePixelRatio, style = getComputedStyle(document.documentElement), context = canvas.getContext("2d");
  const width = canvas.width = canvas.clientWidth * scale, height = canvas.height = canvas.clientHeight * scale;
  past.forEach((rank, at) => {
    let top = height;
    for (const use of USES) {
      const size = rank[use] * height;
      context.fillStyle = style.getPropertyValue(`--${use}`);
      context.fillRect(width * (1 - (past.length - at) / N_SHOWN), top - size, Math.ceil(width / N_SHOWN), size);
      top -= size;
    }
  });
}

async function watch() {
  watching?.abort();
  const mine = watching = new AbortController();
  while (mine === watching) {
    try {
      const answer = await fetch("events", {headers: headers(), signal: mine.signal});
      if (!answer.ok) throw new Error(await refused(answer));
      for await (const snapshot of events(answer)) draw(snapshot);
    } catch (error) {
      if (mine === watching) $("load").textContent = reason(error);
    }
    await new Promise(done => setTimeout(done, 2000));
  }
}

async function meet() {
  try {
    const answer = await fetch("v1/models", {headers: headers()});
    if (!answer.ok) throw new Error(await refused(answer));
    const [model] = (await answer.json()).data;
    $("model").textContent = `${model.id}, up to ${model.max_model_len} tokens`;
    watch();
  } catch (error) {
    $("model").textContent = reason(error);
    if (isLost(error)) setTimeout(meet, 2000);
    if ($("drawer").hidden && /key/.test(error.message)) $("settings").click();
  }
}

$("key").addEventListener("change", meet);
addEventListener("storage", event => {  // another tab has kept a chat
  if (event.key !== CHATS) return;
  chats = read(CHATS, []).map(each => each.id === chat.id ? chat : each);
  showList();
});
const opened = chats.find(each => each.id === read(OPENED, null, "sessionStorage"));
if (opened) open(opened);
else begin();
meet();
