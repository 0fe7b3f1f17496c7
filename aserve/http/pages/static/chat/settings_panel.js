// The panel in which a conversation's settings are seen and changed: at once, nothing has to be saved.

import { button, element, newId } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { forgetKey, storedKey } from "../shared/key.js";
import { toolList } from "./calls.js";
import { NUMBERS } from "./settings.js";
import { editTool } from "./tool_editor.js";

const EFFORTS = ["", "none", "minimal", "low", "medium", "high", "xhigh", "max"];
const FORMATS = { text: "Text", json_object: "JSON, of any shape", json_schema: "JSON, by a schema" };
const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string"},
    "age": {"type": "integer"}
  },
  "required": ["name", "age"]
}`;

/** Shows settings in an element; onChange: they have changed. */
export class SettingsPanel {
  constructor(root, onChange) {
    this.root = root;
    this.onChange = onChange;
    this.fields = new Map(); // what is focused, by the name of the request's field
    this.models = [];
  }

  show(settings) {
    this.settings = settings;
    this.fields.clear();
    this.root.replaceChildren(
      this.#section("", this.#model(), this.#system()),
      this.#section("Sampling", this.#numbers(), this.#stop(), this.#effort()),
      this.#section("Answers", this.#count(), this.#logprobs()),
      this.#section("Format", this.#format()),
      this.#section("Tools", this.#tools()),
      this.#section("More", this.#extra(), this.#key()),
    );
  }

  /** Goes to the field of a request that a name means; whether there is one. */
  focus(name) {
    const field = this.fields.get(ALIASES[name] ?? name);
    field?.focus();
    field?.scrollIntoView({ block: "center" });
    return field !== undefined;
  }

  has(name) {
    return this.fields.has(ALIASES[name] ?? name);
  }

  #section(title, ...parts) {
    const head = title && element("h3", { text: title });
    return element("section", title ? { "aria-label": title } : {}, head, ...parts);
  }

  #field(name, words, input, hint = null) {
    input.id = newId(`set-${name}`);
    this.fields.set(name, input);
    const told = hint && element("span", { class: "hint", id: `${input.id}-hint`, text: hint });
    if (told) input.setAttribute("aria-describedby", told.id);
    return element("div", { class: "field" }, element("label", { htmlFor: input.id, text: words }), input, told);
  }

  #set(changes) {
    Object.assign(this.settings, changes);
    this.onChange();
  }

  #select(options, chosen, onChoose) {
    const choices = Object.entries(options).map(([value, text]) =>
      element("option", { value, text, selected: value === chosen }),
    );
    const on = { change: (event) => onChoose(event.target.value) };
    return element("select", { class: "input", on }, ...choices);
  }

  #area(name, rows, options = {}) {
    const on = { input: (event) => this.#set({ [name]: event.target.value }) };
    return element("textarea", { class: "input", rows, value: this.settings[name], on, ...options });
  }

  #model() {
    const names = this.models.map(({ id }) => id);
    const options = Object.fromEntries(names.map((name) => [name, name]));
    const chosen = names.includes(this.settings.model) ? this.settings.model : names[0];
    const input = this.#select(options, chosen, (model) => this.#set({ model }));
    const length = this.models[0]?.max_model_len;
    return this.#field("model", "Model", input, length ? `up to ${length} tokens together` : null);
  }

  #system() {
    return this.#field("system", "System prompt", this.#area("system", 4, { placeholder: "none" }));
  }

  #numbers() {
    const fields = NUMBERS.map(({ name, label, hint, step }) => {
      const input = element("input", { class: "input", type: "number", step: "any", placeholder: "default" });
      input.value = this.settings.numbers[name] ?? "";
      input.inputMode = step >= 1 ? "numeric" : "decimal";
      input.addEventListener("keydown", (event) => this.#nudge(event, step));
      input.addEventListener("input", () => this.#number(name, input));
      return this.#field(name, label, input, hint);
    });
    return element("div", { class: "two-columns" }, ...fields);
  }

  /** Arrows go by steps that suit the field; what is typed may be any number. */
  #nudge(event, step) {
    const sign = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!sign) return;
    event.preventDefault();
    const digits = Math.max(0, Math.ceil(-Math.log10(step)));
    event.target.value = (Number(event.target.value || 0) + sign * step).toFixed(digits);
    event.target.dispatchEvent(new Event("input"));
  }

  #number(name, input) {
    const numbers = { ...this.settings.numbers };
    if (input.value === "") delete numbers[name];
    else numbers[name] = input.valueAsNumber;
    input.setAttribute("aria-invalid", String(input.validity.badInput));
    this.#set({ numbers });
  }

  #stop() {
    const area = this.#area("stop", 2, { spellcheck: false });
    return this.#field("stop", "Stop strings", area, "one a line, at most 4");
  }

  #effort() {
    const options = Object.fromEntries(EFFORTS.map((effort) => [effort, effort || "default"]));
    const input = this.#select(options, this.settings.effort, (effort) => this.#set({ effort }));
    return this.#field("reasoning_effort", "Reasoning effort", input, "for templates that read it");
  }

  #count() {
    const on = { input: (event) => this.#set({ n: Math.max(1, Math.trunc(event.target.valueAsNumber) || 1) }) };
    const input = element("input", { class: "input", type: "number", min: 1, max: 128, value: this.settings.n, on });
    return this.#field("n", "Answers side by side", input, "of one prompt, computed once");
  }

  #logprobs() {
    const top = { input: (event) => this.#set({ topLogprobs: Math.max(0, event.target.valueAsNumber || 0) }) };
    const value = this.settings.topLogprobs;
    const count = element("input", { class: "input", type: "number", min: 0, value, on: top });
    const many = this.#field("top_logprobs", "The likeliest beside it", count);
    many.hidden = !this.settings.logprobs;
    const on = {
      change: ({ target }) => {
        many.hidden = !target.checked;
        this.#set({ logprobs: target.checked });
      },
    };
    const box = element("input", { type: "checkbox", id: newId("logprobs"), checked: this.settings.logprobs, on });
    this.fields.set("logprobs", box);
    const label = element("label", { htmlFor: box.id, text: "Show how likely each token was" });
    return element("div", { class: "stack" }, element("div", { class: "check" }, box, label), many);
  }

  #format() {
    const schema = this.#area("schema", 10, { spellcheck: false });
    schema.classList.add("code");
    const written = this.#field("schema", "JSON Schema", schema, "enforced token by token");
    written.hidden = this.settings.format !== "json_schema";
    const input = this.#select(FORMATS, this.settings.format, (format) => {
      written.hidden = format !== "json_schema";
      if (format === "json_schema" && !schema.value) schema.value = this.settings.schema = SCHEMA;
      this.#set({ format });
    });
    return element("div", { class: "stack" }, this.#field("response_format", "The answer is", input), written);
  }

  #tools() {
    const root = element("div", { class: "stack" });
    const show = () => root.replaceChildren(...this.#toolParts(change));
    const change = (tools) => {
      this.#set({ tools });
      show();
      this.fields.get("tools").focus();
    };
    show();
    return root;
  }

  #toolParts(change) {
    const { tools } = this.settings;
    const edit = async (tool) => {
      const taken = tools.filter((other) => other !== tool).map(({ name }) => name);
      const made = await editTool(tool, taken);
      if (made) change(tool ? tools.map((other) => (other === tool ? made : other)) : [...tools, made]);
    };
    const adder = button("Add a tool", { icon: icon("add"), kind: "small", on: { click: () => edit(null) } });
    this.fields.set("tools", adder);
    const list = toolList(tools, {
      onSwitch: (tool) => {
        tool.isOn = !tool.isOn;
        this.onChange();
      },
      onEdit: edit,
      onRemove: (tool) => change(tools.filter((other) => other !== tool)),
    });
    const names = tools.map(({ name }) => [name, `${name}, always`]);
    const usual = { auto: "as it likes", required: "some tool, always", none: "no tool" };
    const options = { ...usual, ...Object.fromEntries(names) };
    const chosen = this.settings.toolChoice in options ? this.settings.toolChoice : "auto";
    const choice = this.#select(options, chosen, (toolChoice) => this.#set({ toolChoice }));
    const hint = "The model calls them; you fill in what comes back.";
    return [
      tools.length ? list : element("p", { class: "hint", text: hint }),
      element("div", {}, adder),
      tools.length > 0 && this.#field("tool_choice", "The model calls", choice),
    ].filter(Boolean);
  }

  #extra() {
    const area = this.#area("extra", 3, { spellcheck: false, placeholder: '{"min_tokens": 5}' });
    area.classList.add("code");
    const hint = "a JSON object, which replaces what is set above";
    return this.#field("extra", "Other fields of the request", area, hint);
  }

  #key() {
    if (!storedKey()) return null;
    const forget = button("Forget the API key", { kind: "small" });
    forget.addEventListener("click", () => {
      forgetKey();
      forget.replaceWith(element("p", { class: "hint", role: "status", text: "The key is forgotten." }));
    });
    return element("div", {}, forget);
  }
}

/** Fields of requests, as errors name them, that are set elsewhere. */
const ALIASES = { max_tokens: "max_completion_tokens", messages: "system" };
