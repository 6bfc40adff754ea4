"use strict";
// Shows the OpenAPI document, as text and without anything from elsewhere.

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

// A schema in one or more lines.
function typed(schema, all, depth = 0) {
  if (!schema) return "";
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return depth > 1 ? name : typed(all.components.schemas[name], all, depth);
  }
  if (schema.anyOf) return schema.anyOf.map((each) => typed(each, all, depth)).join(" or ");
  if (schema.enum || schema.const !== undefined) return (schema.enum || [schema.const]).map((v) => JSON.stringify(v)).join(" or ");
  if (schema.type === "array") return `[${typed(schema.items, all, depth + 1)}, ...]`;
  if (schema.type === "object" && schema.properties) {
    const pad = "  ".repeat(depth + 1);
    const lines = Object.entries(schema.properties).map(([key, value]) => {
      const needed = (schema.required || []).includes(key) ? "" : "?";
      return `${pad}${key}${needed}: ${typed(value, all, depth + 1)}${value.description ? `  — ${value.description}` : ""}`;
    });
    return `{\n${lines.join("\n")}\n${"  ".repeat(depth)}}`;
  }
  return schema.format === "binary" ? "bytes" : schema.type || "anything";
}

function operation(verb, path, described, all) {
  const made = element("details", element("summary", element("code", `${verb.toUpperCase()} ${path}`), ` ${described.summary}`));
  made.append(element("p", described.description || ""));
  for (const each of described.parameters || []) {
    const about = each.description || each.schema.description || "";
    made.append(element("p", element("code", each.name), ` (${each.in}${each.required ? "" : ", optional"}) ${about}`));
  }
  for (const [kind, { schema }] of Object.entries(described.requestBody?.content || {})) {
    made.append(element("p", "Body, ", element("code", kind)), element("pre", typed(schema, all)));
  }
  const errors = [];
  for (const [status, { description, content }] of Object.entries(described.responses)) {
    if (status >= "300") errors.push(`${status} ${description}`);
    else {
      made.append(element("p", element("code", status), ` ${description}`));
      const schema = content?.["application/json"]?.schema;
      if (schema) made.append(element("pre", typed(schema, all)));
    }
  }
  if (errors.length) made.append(element("p", `Errors: ${errors.sort().join(", ")}`));
  return made;
}

fetch("openapi.json").then((response) => response.json()).then((all) => {
  for (const [path, verbs] of Object.entries(all.paths)) {
    for (const [verb, described] of Object.entries(verbs)) {
      document.getElementById("operations").append(operation(verb, path, described, all));
    }
  }
});
