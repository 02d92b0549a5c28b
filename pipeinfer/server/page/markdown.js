"use strict";
// Markdown as models write it, made of elements: no text of a model is ever HTML.

function element(name, attributes = {}, ...children) {
  const found = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
    else if (key in found) found[key] = value;
    else found.setAttribute(key, value);
  }
  found.append(...children);
  return found;
}

const INLINE = new RegExp([
  "(?<tick>`+)(?<code>.+?)\\k<tick>(?!`)", "\\*\\*(?<strong>\\S.*?)\\*\\*", "(?<![\\w*])\\*(?<em>[^\\s*][^*]*)\\*(?!\\w)",
  "(?<!\\w)_(?<under>[^\\s_][^_]*)_(?!\\w)", "~~(?<del>.+?)~~", "\\[(?<label>[^\\]]+)\\]\\((?<href>https?:[^)\\s]+)\\)",
  "(?<url>https?:\\/\\/[^\\s<>()]+[^\\s<>().,;:!?])"].join("|"), "gs");

function inline(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    const {code, strong, em, under, del, label, href, url} = match.groups;
    found.push(text.slice(from, match.index));
    if (code !== undefined) found.push(element("code", {}, code));
    else if (href || url)
      found.push(element("a", {href: href ?? url, target: "_blank", rel: "noopener noreferrer"}, label ?? url));
    else found.push(element(strong !== undefined ? "strong" : del !== undefined ? "del" : "em", {},
                            ...inline(strong ?? del ?? em ?? under)));
    from = match.index + match[0].length;
  }
  return [...found, text.slice(from)];
}

function codeBlock(language, code) {
  const copying = element("button", {type: "button", onclick: () => copy(code, copying)}, "Copy");
  return element("div", {className: "code"}, element("div", {}, element("span", {}, language || "code"), copying),
                 element("pre", {tabIndex: 0}, element("code", {}, code)));
}

const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());

function table(lines) {
  const row = (line, kind) => element("tr", {}, ...cells(line).map(cell => element(kind, {}, ...inline(cell))));
  return element("table", {}, element("thead", {}, row(lines[0], "th")),
                 element("tbody", {}, ...lines.slice(2).map(line => row(line, "td"))));
}

const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)/;

function list(lines) {  // items, and within an item what is indented more
  const [, indent, mark] = lines[0].match(ITEM), found = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) found.start = parseInt(mark);
  for (let at = 0; at < lines.length;) {
    const [, , , text] = lines[at++].match(ITEM) ?? [0, 0, 0, lines[at - 1].trim()], inner = [];
    while (at < lines.length && !(lines[at].match(ITEM)?.[1].length <= indent.length)) inner.push(lines[at++]);
    const item = element("li", {}, ...inline(text));
    if (inner.some(line => line.trim())) item.append(markdown(inner.map(line => line.replace(/^ {1,4}/, "")).join("\n")));
    found.append(item);
  }
  return found;
}

function markdown(text) {
  const found = document.createDocumentFragment(), lines = text.split("\n");
  const take = test => { const taken = []; while (lines.length && test(lines[0])) taken.push(lines.shift()); return taken; };
  while (lines.length) {
    const line = lines[0], fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/), head = line.match(/^(#{1,6})\s+(.*)/);
    if (fence) {
      lines.shift();
      const code = take(each => !each.trim().startsWith(fence[1]) || each.trim().replace(/[`~]/g, ""));
      lines.shift();
      found.append(codeBlock(fence[2], code.join("\n")));
    } else if (!line.trim()) lines.shift();
    else if (head) { lines.shift(); found.append(element(`h${Math.min(4, head[1].length)}`, {}, ...inline(head[2]))); }
    else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) { lines.shift(); found.append(element("hr")); }
    else if (line.startsWith(">"))
      found.append(element("blockquote", {}, markdown(take(each => each.startsWith(">")).map(each => each.replace(/^> ?/, "")).join("\n"))));
    else if (ITEM.test(line)) found.append(list(take(each => ITEM.test(each) || /^\s+\S/.test(each))));
    else if (line.includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[1] ?? "")) found.append(table(take(each => each.includes("|"))));
    else {
      const own = [lines.shift(), ...take(each => each.trim() && !/^\s*(```|~~~|#{1,6}\s|>)/.test(each) && !ITEM.test(each))];
      found.append(element("p", {}, ...own.flatMap((each, at) => at ? [element("br"), ...inline(each)] : inline(each))));
    }
  }
  return found;
}
