// The form in which a tool is defined: its name, what it does, and its arguments, as rows or as a JSON Schema.

import { button, element, newId } from "../shared/dom.js";
import { icon } from "../shared/icons.js";

const TYPES = ["string", "number", "integer", "boolean"];
const NAME = "[a-zA-Z0-9_.\\-]{1,128}";
const KNOWN = new Set(["type", "description"]);

/** Opens the form; the promise is of the tool, or of null where the reader thinks better of it. */
export function editTool(tool, takenNames) {
  return new Editor(tool, takenNames).opened();
}

/** A schema as rows of the form; null where rows cannot say it. */
export function rowsOf(schema) {
  const { type = "object", properties = {}, required = [], additionalProperties, ...others } = schema;
  if (type !== "object" || Object.keys(others).length || additionalProperties) return null;
  const rows = Object.entries(properties).map(([name, property]) => ({ name, ...property }));
  const isPlain = (row) => TYPES.includes(row.type) && Object.keys(properties[row.name]).every((key) => KNOWN.has(key));
  if (!rows.every(isPlain)) return null;
  return rows.map((row) => ({ description: "", ...row, isRequired: required.includes(row.name) }));
}

export function schemaOf(rows) {
  const property = ({ type, description }) => (description ? { type, description } : { type });
  const required = rows.filter((row) => row.isRequired).map((row) => row.name);
  const properties = Object.fromEntries(rows.map((row) => [row.name, property(row)]));
  return { type: "object", properties, required, additionalProperties: false };
}

class Editor {
  constructor(tool, takenNames) {
    this.tool = tool ?? { name: "", description: "", parameters: schemaOf([]), strict: true, isOn: true };
    this.takenNames = takenNames;
    const rows = rowsOf(this.tool.parameters);
    this.isJson = rows === null;
    this.rowList = element("div", { class: "argument-rows" });
    for (const row of rows ?? []) this.#addRow(row);
    this.name = this.#input("Name", { required: true, pattern: NAME, placeholder: "get_weather", maxLength: 128 });
    this.name.input.title = "letters, digits, and _ . -";
    this.description = this.#input("What it does", { placeholder: "Get the weather of a city." });
    const options = { class: "input code", rows: 9, spellcheck: false, "aria-label": "Arguments as a JSON Schema" };
    this.schema = element("textarea", options);
    this.strict = element("input", { type: "checkbox", id: newId("strict"), checked: this.tool.strict });
    this.name.input.value = this.tool.name;
    this.description.input.value = this.tool.description;
    this.schema.value = JSON.stringify(this.tool.parameters, null, 2);
    this.fault = element("p", { class: "note bad", role: "alert", hidden: true });
    this.dialog = this.#dialog();
    this.#showKind();
  }

  opened() {
    document.body.append(this.dialog);
    this.dialog.showModal();
    return new Promise((resolve) => {
      this.dialog.addEventListener("close", () => {
        this.dialog.remove();
        resolve(this.dialog.returnValue === "done" ? this.made : null);
      });
    });
  }

  #dialog() {
    const title = newId("title");
    this.kindSwitch = button("", { kind: "quiet small", on: { click: () => this.#changeKind() } });
    const add = { click: () => this.#addRow().focus() };
    this.adder = button("Add an argument", { icon: icon("add"), kind: "small", on: add });
    const label = element("span", { class: "label", text: "Arguments" });
    const head = element("div", { class: "two-ends" }, label, this.kindSwitch);
    this.rowsField = element("div", { class: "stack" }, this.rowList, element("div", {}, this.adder));
    const words = "Hold calls to these arguments, token by token";
    const strictLabel = element("label", { htmlFor: this.strict.id, text: words });
    return element(
      "dialog",
      { class: "tool-editor", "aria-labelledby": title },
      element(
        "form",
        { on: { submit: (event) => this.#submit(event) } },
        element("h2", { id: title, text: this.tool.name ? "Change a tool" : "A tool for the model" }),
        this.name.field,
        this.description.field,
        element("div", { class: "field" }, head, this.rowsField, this.schema),
        element("div", { class: "check" }, this.strict, strictLabel),
        this.fault,
        element(
          "div",
          { class: "actions" },
          button("Cancel", { kind: "quiet", on: { click: () => this.dialog.close() } }),
          button("Save", { kind: "primary", type: "submit" }),
        ),
      ),
    );
  }

  #input(words, options) {
    const id = newId("tool-field");
    const input = element("input", { id, class: "input", ...options });
    return { input, field: element("div", { class: "field" }, element("label", { htmlFor: id, text: words }), input) };
  }

  #addRow(row = { name: "", type: "string", description: "", isRequired: true }) {
    const input = (words, options) => element("input", { class: "input", "aria-label": words, ...options });
    const name = input("Name of the argument", { value: row.name, placeholder: "city", required: true });
    name.dataset.part = "name";
    const options = TYPES.map((type) => element("option", { value: type, text: type, selected: type === row.type }));
    const type = element("select", { class: "input", "aria-label": "Type", data: { part: "type" } }, ...options);
    const told = input("What the argument is", { value: row.description, placeholder: "what it is" });
    told.dataset.part = "description";
    const box = element("input", { type: "checkbox", checked: row.isRequired, data: { part: "isRequired" } });
    const made = element("div", { class: "argument-row" }, name, type, told);
    const remove = { icon: icon("close"), shown: false, kind: "quiet small", on: { click: () => made.remove() } };
    made.append(element("label", { class: "check" }, box, "needed"), button("Remove this argument", remove));
    this.rowList.append(made);
    return name;
  }

  #rows() {
    return [...this.rowList.children].map((row) => {
      const part = (name) => row.querySelector(`[data-part="${name}"]`);
      const [name, type, description] = ["name", "type", "description"].map((each) => part(each).value.trim());
      return { name, type, description, isRequired: part("isRequired").checked };
    }).filter(({ name }) => name !== "");
  }

  #changeKind() {
    this.#complain("");
    if (this.isJson) {
      const schema = this.#schema();
      const rows = schema && rowsOf(schema);
      if (!rows) {
        if (schema) this.#complain("Rows cannot say all that this schema does.");
        return;
      }
      this.rowList.replaceChildren();
      for (const row of rows) this.#addRow(row);
    } else {
      this.schema.value = JSON.stringify(schemaOf(this.#rows()), null, 2);
    }
    this.isJson = !this.isJson;
    this.#showKind();
  }

  #showKind() {
    this.rowsField.hidden = this.isJson;
    for (const part of this.rowsField.querySelectorAll("input, select")) part.disabled = this.isJson;
    this.schema.hidden = !this.isJson;
    this.kindSwitch.textContent = this.isJson ? "As rows" : "As a JSON Schema";
  }

  /** The schema that is written there; null, and a word of why, where it is none. */
  #schema() {
    try {
      const schema = JSON.parse(this.schema.value);
      if (schema !== null && typeof schema === "object" && !Array.isArray(schema)) return schema;
      this.#complain("A JSON Schema is an object.");
    } catch (error) {
      this.#complain(`Not valid JSON: ${error.message}`);
    }
    return null;
  }

  #submit(event) {
    event.preventDefault();
    const name = this.name.input.value.trim();
    if (this.takenNames.includes(name)) return this.#complain(`There is a tool named ${name} already.`);
    const parameters = this.isJson ? this.#schema() : schemaOf(this.#rows());
    if (parameters === null) return undefined;
    const description = this.description.input.value.trim();
    this.made = { ...this.tool, name, description, parameters, strict: this.strict.checked };
    return this.dialog.close("done");
  }

  #complain(words) {
    this.fault.textContent = words;
    this.fault.hidden = !words;
  }
}
