// Requests to the board's own server.
const HEADERS = { "Content-Type": "application/json", "X-Surefoot": "1" };

async function answered(response) {
  const text = await response.text();
  let data = null;
  try { data = JSON.parse(text); } catch { /* said as text below */ }
  if (!response.ok) throw Object.assign(new Error(data?.error || text.trim() || `HTTP ${response.status}`), { status: response.status });
  return data;
}

// A path, or a page, with the words that have a value.
export function address(path, query = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  return words.size ? `${path}?${words}` : path;
}

export const get = async (path, query) => answered(await fetch(address(path, query)));

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
