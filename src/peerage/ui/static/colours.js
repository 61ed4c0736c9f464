// The colours of the reports: those of Okabe and Ito, those of the phases, and viridis.
export const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666"];
export const PHASES = {
  train: "#0072B2", curvature: "#E69F00", losses: "#E69F00", synthesis: "#D55E00", compute: "#666666",
  combine: "#009E73", exchange: "#CC79A7", evaluate: "#56B4E9", wait: "#BBBBBB", other: "#EEEEEE",
};
export const VIRIDIS = ["#440154", "#48186a", "#472d7b", "#424086", "#3b528b", "#33638d", "#2c728e", "#26828e", "#21918c", "#1fa088", "#28ae80", "#3fbc73", "#5ec962", "#84d44b", "#addc30", "#d8e219", "#fde725"];
export const ABSENT = "#9aa0a6";
const ramp = VIRIDIS.map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));

// A colour between 0 and 1, in 256 steps.
const steps = Array.from({ length: 256 }, (_, number) => {
  const place = (number / 255) * (ramp.length - 1), low = Math.min(Math.floor(place), ramp.length - 2);
  const mixed = ramp[low].map((value, channel) => Math.round(value + (place - low) * (ramp[low + 1][channel] - value)));
  return `rgb(${mixed.join(",")})`;
});
export const viridis = (share) => steps[Math.min(Math.max(Math.round(share * 255), 0), 255)];
