// Requests to the board's own server.
const HEADERS = { "Content-Type": "application/json", "X-Surefoot": "1" };

export class Failure extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

async function answered(response) {
  const text = await response.text();
  let data = null;
  try { data = JSON.parse(text); } catch { /* said as text below */ }
  if (!response.ok) throw new Failure(data?.error || text.trim() || `HTTP ${response.status}`, response.status);
  return data;
}

function address(path, query) {
  const found = new URL(path, location.origin);
  for (const [name, value] of Object.entries(query || {})) {
    if (value !== null && value !== undefined) found.searchParams.set(name, value);
  }
  return found;
}

export const get = async (path, query, signal) => answered(await fetch(address(path, query), { signal }));

export const post = async (path, body, query) => answered(
  await fetch(address(path, query), { method: "POST", headers: HEADERS, body: JSON.stringify(body ?? {}) }));

export async function stream(path, body, on, signal) {
  const response = await fetch(path, { method: "POST", headers: HEADERS, body: JSON.stringify(body), signal });
  if (!response.ok) return answered(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return null;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.filter(Boolean).forEach((line) => on(JSON.parse(line)));
  }
}
